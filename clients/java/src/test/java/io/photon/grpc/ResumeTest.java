package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Test;

/** Servers that are killed and drained under a stream; {@code -Dphoton.kills=200} is the long form. */
class ResumeTest {
  private static final int KILLS = Integer.getInteger("photon.kills", 2);
  private static final int TOKENS = 120;
  private static final ExecutorService THREADS = Executors.newCachedThreadPool();

  @Test
  void aKilledServerCostsNoTokenAndRepeatsNone() throws Exception {
    var random = new Random(1);
    var cut = 0;
    try (var client = Client.connect(Replicas.targets());
        var many = client.multiplex()) {
      for (int kill = 0; kill < KILLS; kill++) {
        var requests = IntStream.range(4 * kill, 4 * kill + 4).mapToObj(ResumeTest::drawn).toList();
        var wholes = requests.stream().map(client::generate).toList();
        var lasts = wholes.get(0).timing().total().multipliedBy(2);
        var told = requests.stream().map(request -> tell(random.nextBoolean() ? client : many, request)).toList();
        Thread.sleep(random.nextLong(lasts.toMillis()));
        var victim = random.nextBoolean() ? Replicas.ONE : Replicas.OTHER;
        cut += victim.load().getRunningRequests();
        victim.kill();
        for (int i = 0; i < requests.size(); i++) {
          told.get(i).get(120, TimeUnit.SECONDS).assertIs(wholes.get(i));
        }
        victim.restart();
        System.out.printf("%d kills, %d streams cut%n", kill + 1, cut);
      }
    }
    assertTrue(cut > 0);
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
