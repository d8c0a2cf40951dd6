package io.photon.grpc;

import static io.photon.grpc.ScriptedServer.failure;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.photon.grpc.ScriptedServer.Script;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.GenerationStart;
import io.photon.grpc.v1.Output;
import io.photon.grpc.v1.StreamGenerateResponse;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/**
 * What a server with a model shows only now and then: cuts by the hundred ({@code -Dphoton.fake.kills=200}), slow
 * readers, replicas that do not answer.
 */
@Timeout(200)
class FakeServerTest {
  private static final int KILLS = Integer.getInteger("photon.fake.kills", 40);

  /** Every stream of a killed server is cut; which of its tokens were sent and not read is left to the sockets. */
  @Test
  void killsCostNoTokenAndRepeatNone() throws Exception {
    var random = new Random(2);
    ExecutorService threads = Executors.newCachedThreadPool();
    try (var one = new FakeServer(1, true);
        var other = new FakeServer(1, true);
        var client = Client.connect("ipv4:" + one.target() + "," + other.target());
        var many = client.multiplex()) {
      var servers = List.of(one, other);
      for (int kill = 0; kill < KILLS; kill++) {
        var request = Request.text("x").seed(kill).maxTokens(40).tokenIds(true);
        var calls = kill % 4 == 0 ? many : client;
        var told = List.of(tell(calls, request, threads), tell(client, request, threads));
        Thread.sleep(random.nextInt(40));
        var victim = servers.get(random.nextInt(2));
        victim.kill();
        for (var each : told) {
          assertEquals(FakeServer.tokens(request.toProto()), each.get(60, TimeUnit.SECONDS));
        }
        victim.restart();
        client.reconnect();
        client.waitUntilReady(Duration.ofSeconds(20));
      }
      var resumed = servers.stream().flatMap(server -> server.requests.stream());
      assertTrue(resumed.filter(request -> request.hasContinueFrom()).count() > KILLS / 4);
    } finally {
      threads.shutdownNow();
    }
  }

  @Test
  void aResumedStreamGoesOnWithTheSeedThatWasTold() throws Exception {
    try (var server = new FakeServer(1, true);
        var client = Client.connect(server.target())) {
      server.standsAfter = 20;
      var stream = client.stream(Request.text("x").requestId("mine").seed(-1).maxTokens(60));
      var text = new StringBuilder();
      for (int i = 0; i < 5; i++) {
        text.append(stream.next().text());
      }
      server.kill();
      server.standsAfter = Integer.MAX_VALUE;
      server.restart();
      stream.forEach(delta -> text.append(delta.text()));
      var first = server.requests.get(0);
      var second = server.requests.get(server.requests.size() - 1);
      assertEquals(FakeServer.text(FakeServer.tokens(first)), text.toString());
      assertTrue(first.getOutput().getTokenIds());
      assertEquals(-1, second.getSampling().getSeed());
      assertEquals("mine", second.getRequestId());
      assertTrue(second.getContinueFrom().getIdsCount() >= 5);
      assertEquals(new Usage(3, 0, 60, 0, 0), stream.usage());
    }
  }

  /** The server assigns an id where the caller gives none, and may hold it for a while after the connection is lost. */
  @Test
  void aStreamIsResumedUnderTheIdOfItsStart() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      var start = GenerationStart.newBuilder().setRequestId("assigned").setRelease(ScriptedServer.RELEASE);
      var begun =
          StreamGenerateResponse.newBuilder()
              .setSequence(1)
              .setStart(start)
              .addDeltas(Output.newBuilder().setText("half ").addTokenIds(1))
              .build();
      server.script =
          request ->
              switch (server.requests.size()) {
                case 1 -> Script.failing(failure(Status.Code.UNAVAILABLE, "ENGINE_FAILURE"), begun);
                case 2, 3 -> Script.failing(failure(Status.Code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"));
                default -> Script.of(ScriptedServer.DONE);
              };
      for (var calls : List.of(client, many)) {
        server.requests.clear();
        var text = new StringBuilder();
        calls.stream(Request.text("x")).forEach(delta -> text.append(delta.text()));
        assertEquals("half done", text.toString());
        var ids = server.requests.stream().skip(1).map(GenerateRequest::getRequestId).toList();
        assertEquals(List.of("assigned", "assigned", "assigned"), ids);
      }
    }
  }

  @Test
  void aStreamThatCannotBeResumedSaysSo() throws Exception {
    try (var server = new FakeServer(1, true);
        var client = Client.connect(server.target());
        var bold = Client.builder(server.target()).resume(false).build()) {
      var several = client.stream(Request.text("x").maxTokens(10_000_000).numOutputs(2));
      var plain = bold.stream(Request.text("x").maxTokens(10_000_000));
      several.next();
      plain.next();
      server.kill();
      var error = assertThrows(PhotonException.Unavailable.class, () -> several.forEach(delta -> {}));
      assertTrue(error.getMessage().contains("num_outputs"), error.getMessage());
      assertThrows(PhotonException.Unavailable.class, () -> plain.forEach(delta -> {}));
    }
  }

  @Test
  void theFirstAnswerWinsAndTheOtherCallIsCancelled() throws Exception {
    try (var silent = new FakeServer(0, false);
        var quick = new FakeServer(0, true);
        var client = Client.connect("ipv4:" + silent.target() + "," + quick.target())) {
      // Until both are connected a call's second attempt has only one place to go to.
      while (silent.requests.isEmpty() || quick.requests.isEmpty()) {
        client.stream(Request.text("x").maxTokens(1)).forEach(delta -> {});
      }
      var before = silent.requests.size();
      for (int i = 0; i < 4; i++) {
        var request = Request.text("x").hedgeAfter(Duration.ofMillis(50)).requestId("r" + i);
        assertEquals("done", client.generate(request).text());
      }
      assertTrue(silent.requests.size() > before);
      await(() -> silent.cancelled.get() == silent.requests.size() - before);
    }
  }

  @Test
  void aReaderThatStopsStopsTheServer() throws Exception {
    try (var server = new FakeServer(0, true);
        var client = Client.connect(server.target());
        var stream = client.stream(Request.text("x").maxTokens(10_000_000))) {
      stream.next();
      int before;
      do {
        before = server.written.get();
        Thread.sleep(300);
      } while (server.written.get() != before);
      assertTrue(before < 1_000_000, "written ahead: " + before);
      for (int i = 0; i < before + 10; i++) {
        stream.next();
      }
      assertTrue(server.written.get() > before);
    }
  }

  @Test
  void aThousandCallsShareAStream() throws Exception {
    try (var server = new FakeServer(0, true);
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      var futures = new ArrayList<CompletableFuture<Generation>>();
      for (int i = 0; i < 1000; i++) {
        futures.add(many.generateAsync(Request.text("x").seed(i).maxTokens(20)));
      }
      for (int i = 0; i < 1000; i++) {
        var whole = futures.get(i).get(60, TimeUnit.SECONDS);
        var expected = FakeServer.tokens(Request.text("x").seed(i).maxTokens(20).toProto());
        assertEquals(FakeServer.text(expected), whole.text());
        assertEquals(20, whole.usage().outputTokens());
      }
    }
  }

  /** gRPC repeats calls, not what is on them. */
  @Test
  void requestsOfAStreamThatIsFullAreSentAgainAsOftenAsCalls() throws Exception {
    try (var server = new FakeServer(0, true);
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      server.refusal = queueFull(Duration.ofMillis(20));
      server.refusals = Channels.MAX_RETRIES;
      var request = Request.text("x").maxTokens(2).timeout(Duration.ofSeconds(100));
      var futures = Stream.generate(() -> many.generateAsync(request)).limit(500).toList();
      for (var future : futures) {
        assertEquals(2, future.get(60, TimeUnit.SECONDS).usage().outputTokens());
      }
      assertEquals(500 * (1 + Channels.MAX_RETRIES), server.requests.size());
      var last = server.requests.get(server.requests.size() - 1).getScheduling().getTimeout();
      assertTrue(Durations.read(last).compareTo(Duration.ofMillis(100_000 - 4 * 20)) <= 0, last.toString());

      server.refusals = Integer.MAX_VALUE;
      assertThrows(PhotonException.QueueFull.class, () -> many.stream(request).next());
      assertEquals(501 * (1 + Channels.MAX_RETRIES), server.requests.size());
    }
  }

  @Test
  void aRefusalIsFinalWhereItSaysNoTimeOrOneBehindTheDeadlineOrNoRetriesAreWanted() throws Exception {
    try (var server = new FakeServer(0, true);
        var client = Client.connect(server.target());
        var many = client.multiplex();
        var once = Client.builder(server.target()).retries(0).build();
        var manyOnce = once.multiplex()) {
      server.refusals = Integer.MAX_VALUE;
      server.refusal = queueFull(null);
      assertThrows(PhotonException.QueueFull.class, () -> many.generate(Request.text("x")));
      server.refusal = queueFull(Duration.ofSeconds(50));
      var brief = Request.text("x").timeout(Duration.ofSeconds(40));
      assertThrows(PhotonException.QueueFull.class, () -> many.generate(brief));
      server.refusal = queueFull(Duration.ofMillis(1));
      assertThrows(PhotonException.QueueFull.class, () -> manyOnce.generate(Request.text("x")));
      assertEquals(3, server.requests.size());
    }
  }

  @Test
  void anIdleStreamWhosePlaceWasNeededIsOpenedAgainSilently() throws Exception {
    try (var server = new FakeServer(0, true);
        var client = Client.builder(server.target()).retries(0).build();
        var many = client.multiplex()) {
      server.evictions.set(3);
      for (int i = 0; i < 3; i++) {
        assertEquals(2, many.generate(Request.text("x").maxTokens(2)).usage().outputTokens());
      }
      assertEquals(4, server.streams.get());
      assertEquals(3, server.requests.size());
      server.evictions.set(1000);
      assertThrows(PhotonException.IdleStreamEvicted.class, () -> many.generate(Request.text("x")));
    }
  }

  @Test
  void aRequestThatWaitsToBeSentAgainCanBeCancelled() throws Exception {
    try (var server = new FakeServer(0, true);
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      server.refusal = queueFull(Duration.ofMillis(200));
      server.refusals = 1;
      var stream = many.stream(Request.text("x").maxTokens(2));
      await(() -> server.requests.size() == 1);
      stream.cancel();
      assertThrows(PhotonException.Cancelled.class, stream::next);
    }
  }

  @Test
  void aRequestOfAStreamIsCancelledAlone() throws Exception {
    try (var server = new FakeServer(0, true);
        var client = Client.connect(server.target());
        var many = client.multiplex();
        var dropped = many.stream(Request.text("x").maxTokens(100_000_000))) {
      dropped.next();
      dropped.close();
      await(() -> server.cancelled.get() == 1);
      assertEquals(2, many.generate(Request.text("x").maxTokens(2)).usage().outputTokens());
    }
  }

  @Test
  void aClosedMultiplexEndsWhatRuns() throws Exception {
    try (var server = new FakeServer(50, true);
        var client = Client.connect(server.target())) {
      var many = client.multiplex();
      var stream = many.stream(Request.text("x").maxTokens(100_000_000));
      stream.next();
      many.close();
      assertThrows(PhotonException.Closed.class, () -> stream.forEach(delta -> {}));
      assertThrows(PhotonException.Closed.class, () -> many.stream(Request.text("x")));
    }
  }

  /** Its caller may unload its classes next. */
  @Test
  void aClosedClientHasNoConnectionLeft() throws Exception {
    try (var server = new FakeServer(1, true)) {
      for (int i = 0; i < 20; i++) {
        var client = Client.connect(server.target());
        client.waitUntilReady(Duration.ofSeconds(20));
        client.stream(Request.text("x").maxTokens(1000)).next();
        client.close();
        assertTrue(client.channel.isTerminated());
        assertTrue(client.anyState.isTerminated());
      }
    }
  }

  @Test
  void anInterruptedThreadClosesAndStaysInterrupted() throws Exception {
    try (var server = new FakeServer(1, true)) {
      var client = Client.connect(server.target());
      client.stream(Request.text("x").maxTokens(1000)).next();
      Thread.currentThread().interrupt();
      client.close();
      assertTrue(Thread.interrupted());
      assertTrue(client.channel.isShutdown());
    }
  }

  @Test
  void aClosedClientSaysSoToCallsThatRanAndToThoseThatCome() throws Exception {
    try (var server = new FakeServer(50, false)) {
      var client = Client.connect(server.target());
      var many = client.multiplex();
      var endless = Request.text("x").maxTokens(100_000_000);
      var stream = client.stream(endless);
      var shared = many.stream(endless);
      stream.next();
      shared.next();
      var unary = client.generateAsync(endless);
      client.close();
      assertThrows(PhotonException.Closed.class, () -> stream.forEach(delta -> {}));
      assertThrows(PhotonException.Closed.class, () -> shared.forEach(delta -> {}));
      assertThrows(PhotonException.Closed.class, () -> Generator.await(unary));
      assertThrows(PhotonException.Closed.class, () -> client.generate(endless));
      assertThrows(PhotonException.Closed.class, () -> client.stream(endless));
      assertThrows(PhotonException.Closed.class, () -> many.stream(endless));
      assertEquals("CLOSED", assertThrows(PhotonException.Closed.class, client::models).reason());
    }
  }

  private static com.google.rpc.Status queueFull(Duration retryAfter) {
    var info = ErrorInfo.newBuilder().setDomain("photon-grpc").setReason("QUEUE_FULL");
    var error = com.google.rpc.Status.newBuilder().setCode(Status.Code.RESOURCE_EXHAUSTED.value());
    error.setMessage("the queue is full").addDetails(Any.pack(info.build()));
    if (retryAfter != null) {
      error.addDetails(Any.pack(RetryInfo.newBuilder().setRetryDelay(Durations.write(retryAfter)).build()));
    }
    return error.build();
  }

  private static CompletableFuture<List<Integer>> tell(Generator calls, Request request, ExecutorService threads) {
    return CompletableFuture.supplyAsync(
        () -> {
          var ids = new ArrayList<Integer>();
          try (var stream = calls.stream(request)) {
            stream.forEach(delta -> ids.addAll(delta.tokenIds()));
          }
          return ids;
        },
        threads);
  }

  private static void await(BooleanSupplier isSo) throws InterruptedException {
    for (int i = 0; i < 1000 && !isSo.getAsBoolean(); i++) {
      Thread.sleep(10);
    }
    assertTrue(isSo.getAsBoolean());
  }
}
