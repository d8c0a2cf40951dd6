package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;

/** Servers that are killed and drained under a stream; {@code -Dphoton.kills=200} is the long form. */
class ResumeTest {
  private static final int KILLS = Integer.getInteger("photon.kills", 8);
  private static final int TOKENS = 40;
  private static final ExecutorService THREADS = Executors.newCachedThreadPool();

  @Test
  void aKilledServerCostsNoTokenAndRepeatsNone() throws Exception {
    var random = new Random(1);
    var underWay = 0;
    var lasts = Duration.ofMillis(200);
    try (var replicas = new ForkedReplicas(2);
        var client = Client.connect(replicas.target());
        var many = client.multiplex()) {
      client.waitUntilReady(Replica.PATIENCE);
      for (int kill = 0; kill < KILLS; kill++) {
        var requests = List.of(drawn(2 * kill), drawn(2 * kill + 1));
        var wholes = requests.stream().map(client::generate).toList();
        var calls = random.nextInt(4) == 0 ? many : client;
        var start = System.nanoTime();
        var told = requests.stream().map(request -> tell(calls, request)).toList();
        Thread.sleep(random.nextLong(lasts.toMillis()));
        underWay += told.stream().filter(each -> !each.isDone()).count();
        var victim = random.nextInt(2);
        replicas.kill(victim);
        for (int i = 0; i < requests.size(); i++) {
          told.get(i).get(100, TimeUnit.SECONDS).assertIs(wholes.get(i));
        }
        lasts = lasts.plusNanos(System.nanoTime() - start).dividedBy(2);
        replicas.restart(victim);
        client.reconnect();
        client.waitUntilReady(Replica.PATIENCE);
        if (kill % 10 == 9 || kill == KILLS - 1) {
          System.out.printf("%d kills, %d of %d streams under way%n", kill + 1, underWay, 2 * kill + 2);
        }
      }
    }
    assertTrue(underWay > 0);
  }

  @Test
  void aDrainedServerCostsNoToken() throws Exception {
    try (var client = Client.connect(Replicas.targets())) {
      var request = Request.text("class Stack:").temperature(1).seed(5).maxTokens(600).ignoreEos(true).tokenIds(true);
      var whole = client.generate(request);
      var told = tell(client, request);
      Thread.sleep(200);
      var drained = atWork();
      drained.drain();
      told.get(120, TimeUnit.SECONDS).assertIs(whole);
      drained.restart();
    }
  }

  private static Request drawn(int seed) {
    return Request.text("def fib(n):").temperature(1).seed(seed).maxTokens(TOKENS).ignoreEos(true).tokenIds(true);
  }

  private static CompletableFuture<Told> tell(Generator calls, Request request) {
    return CompletableFuture.supplyAsync(() -> Told.of(calls, request), THREADS);
  }

  private static Replica atWork() {
    return Replicas.OTHER.load().getRunningRequests() > 0 ? Replicas.OTHER : Replicas.ONE;
  }

  /** What a stream told, whoever told it. */
  private record Told(String text, List<Integer> ids, Usage usage, Finish finish) {
    static Told of(Generator calls, Request request) {
      var text = new StringBuilder();
      var ids = new ArrayList<Integer>();
      Finish finish = null;
      try (var stream = calls.stream(request)) {
        for (var delta : stream) {
          text.append(delta.text());
          ids.addAll(delta.tokenIds());
          finish = delta.finish();
        }
        return new Told(text.toString(), ids, stream.usage(), finish);
      }
    }

    void assertIs(Generation whole) {
      assertEquals(whole.tokenIds(), ids);
      assertEquals(whole.text(), text);
      assertEquals(whole.usage().promptTokens(), usage.promptTokens());
      assertEquals(whole.usage().outputTokens(), usage.outputTokens());
      assertEquals(whole.finish(), finish);
    }
  }
}
