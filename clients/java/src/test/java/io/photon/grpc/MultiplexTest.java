package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.Test;

/** Requests of one stream against a server with the embedded model: each gets what it gets alone. */
class MultiplexTest {
  private static final Client CLIENT = Client.connect(Replicas.ONE.target);

  @AfterAll
  static void close() {
    CLIENT.close();
  }

  private static final List<Request> REQUESTS =
      List.of(
          Request.text("def fib(n):").temperature(0).maxTokens(12),
          Request.text("class Stack:").temperature(1.2).seed(3).numOutputs(3).maxTokens(12),
          Request.text("import ").temperature(0.8).seed(4).tokenIds(true).logprobs(2).maxTokens(12),
          Request.text("x = ").choices("one", "two", "three").temperature(1).seed(5),
          Request.chat(new Chat().user("Add two numbers.")).temperature(0).maxTokens(12));

  @Test
  void mixedRequestsGetWhatEachGetsAlone() throws Exception {
    var alone = REQUESTS.stream().map(CLIENT::generate).map(Generation::outputs).toList();
    try (var many = CLIENT.multiplex()) {
      var shared = REQUESTS.stream().map(many::generateAsync).toList();
      for (int i = 0; i < alone.size(); i++) {
        var outputs = shared.get(i).get(60, TimeUnit.SECONDS).outputs();
        assertEquals(alone.get(i).stream().map(Output::text).toList(), outputs.stream().map(Output::text).toList());
        assertEquals(
            alone.get(i).stream().map(Output::tokenIds).toList(), outputs.stream().map(Output::tokenIds).toList());
        assertEquals(
            alone.get(i).stream().map(Output::finish).toList(), outputs.stream().map(Output::finish).toList());
      }
      assertEquals(CLIENT.generate(REQUESTS.get(0)).text(), many.generate(REQUESTS.get(0)).text());
    }
  }

  @Test
  void oneThatFailsHarmsNoOther() throws Exception {
    try (var many = CLIENT.multiplex()) {
      var good = many.generateAsync(REQUESTS.get(0));
      var error =
          assertThrows(PhotonException.InvalidRequest.class, () -> many.generate(Request.text("x").topP(0)));
      assertEquals("sampling.top_p", error.field());
      assertEquals(12, good.get(60, TimeUnit.SECONDS).usage().outputTokens());
    }
  }

  @Test
  void anIdInFlightOrTooLongIsRefused() {
    var request = Request.text("x").requestId("same").maxTokens(2000).ignoreEos(true);
    try (var many = CLIENT.multiplex();
        var first = many.stream(request)) {
      first.next();
      assertThrows(PhotonException.DuplicateRequestId.class, () -> many.stream(request).next());
      var tooLong = Request.text("x").requestId("i".repeat(129));
      assertThrows(PhotonException.InvalidRequest.class, () -> many.stream(tooLong).next());
      first.next();
    }
  }

  @Test
  void leavingAStreamOfManyFreesTheServer() throws Exception {
    var endless = Request.text("x").maxTokens(3000).ignoreEos(true);
    try (var many = CLIENT.multiplex()) {
      try (var stream = many.stream(endless)) {
        stream.next();
      }
      many.generateAsync(endless).cancel(true);
      Replicas.ONE.awaitIdle();
      assertEquals(2, many.generate(Request.text("x").maxTokens(2).ignoreEos(true)).usage().outputTokens());
    }
  }

  @Test
  void newRequestsLeaveAServerThatDrainsWhileTheOldOneEnds() throws Exception {
    try (var one = Replica.start("--drain-timeout", "200");
        var other = Replica.start("--drain-timeout", "200");
        var client = Client.connect("ipv4:" + one.awaitReady().target + "," + other.awaitReady().target);
        var many = client.multiplex();
        var old = many.stream(Request.text("x").maxTokens(3000).ignoreEos(true))) {
      old.next();
      var drained = one.load().getRunningRequests() > 0 ? one : other;
      drained.beginToDrain();
      try (var direct = Client.connect(drained.target)) {
        while (direct.isReady()) {
          Thread.sleep(10);
        }
      }
      assertEquals(2, many.generate(Request.text("x").maxTokens(2).ignoreEos(true)).usage().outputTokens());
      assertEquals(1, drained.load().getRunningRequests());
      old.forEach(delta -> {});
      assertEquals(3000, old.usage().outputTokens());
    }
  }

  @Test
  void aHundredAtOnceOnOneStream() throws Exception {
    try (var many = CLIENT.multiplex()) {
      var request = Request.text("def f():").temperature(0).maxTokens(4).ignoreEos(true);
      var all = IntStream.range(0, 100).mapToObj(i -> many.generateAsync(request)).toList();
      CompletableFuture.allOf(all.toArray(new CompletableFuture<?>[0])).get(100, TimeUnit.SECONDS);
      assertTrue(all.stream().map(CompletableFuture::join).map(Generation::text).distinct().count() == 1);
    }
  }
}
