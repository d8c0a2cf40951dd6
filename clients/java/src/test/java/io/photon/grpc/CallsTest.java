package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Flow;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.Test;

/** Calls against a server with the embedded model. */
class CallsTest {
  private static final Client CLIENT = Client.connect(Replicas.ONE.target);

  @AfterAll
  static void close() {
    CLIENT.close();
  }

  private static Request greedy(int maxTokens) {
    return Request.text("def fib(n):").maxTokens(maxTokens).temperature(0).ignoreEos(true);
  }

  @Test
  void joinedDeltasAreTheWholeResult() {
    var request = greedy(24).tokenIds(true).logprobs(2);
    var whole = CLIENT.generate(request);
    var text = new StringBuilder();
    var ids = new ArrayList<Integer>();
    var scores = new ArrayList<TokenScore>();
    try (var stream = CLIENT.stream(request)) {
      for (var delta : stream) {
        text.append(delta.text());
        ids.addAll(delta.tokenIds());
        scores.addAll(delta.scores());
      }
      assertEquals(whole.usage().outputTokens(), stream.usage().outputTokens());
      assertEquals(whole.model(), stream.start().model());
      assertTrue(stream.timing().total().compareTo(stream.timing().firstToken()) >= 0);
    }
    assertEquals(whole.text(), text.toString());
    assertEquals(whole.tokenIds(), ids);
    assertEquals(whole.outputs().get(0).scores(), scores);
  }

  @Test
  void scoresUsageAndTimingAreRecords() {
    var result = CLIENT.generate(greedy(5).tokenIds(true).logprobs(3).promptLogprobs(0).promptTokenIds(true));
    assertEquals("MAX_TOKENS", result.finish().reason());
    assertEquals(5, result.usage().outputTokens());
    assertEquals(result.promptTokenIds().size(), result.usage().promptTokens());
    assertEquals(result.promptTokenIds().size(), result.promptScores().size());
    var score = result.outputs().get(0).scores().get(0);
    assertEquals(result.tokenIds().get(0), score.tokenId());
    assertEquals(1, score.rank());
    assertEquals(3, score.candidates().size());
    assertEquals(score.logprob(), score.candidates().get(0).logprob());
    assertTrue(result.timing().total().compareTo(Duration.ZERO) > 0);
  }

  @Test
  void idsThatTheCallerDoesNotAskForAreNotTold() {
    assertEquals(List.of(), CLIENT.generate(greedy(3)).tokenIds());
    try (var stream = CLIENT.stream(greedy(3))) {
      stream.forEach(delta -> assertEquals(List.of(), delta.tokenIds()));
    }
  }

  @Test
  void severalOutputsOfOnePrompt() {
    var request = Request.text("import ").temperature(1.2).seed(7).numOutputs(3).maxTokens(6).ignoreEos(true);
    var texts = new String[] {"", "", ""};
    try (var stream = CLIENT.stream(request)) {
      stream.forEach(delta -> texts[delta.index()] += delta.text());
    }
    var outputs = CLIENT.generate(request).outputs();
    assertEquals(List.of(texts), outputs.stream().map(Output::text).toList());
  }

  @Test
  void futuresAndPublishersGiveTheSame() throws Exception {
    var whole = CLIENT.generate(greedy(16)).text();
    assertEquals(whole, CLIENT.generateAsync(greedy(16)).get(60, TimeUnit.SECONDS).text());
    var collector = new Collector(1);
    CLIENT.publish(greedy(16)).subscribe(collector);
    assertEquals(whole, collector.text.get(60, TimeUnit.SECONDS));
  }

  @Test
  void aChatIsAnsweredThroughTheModelsTemplate() {
    var chat = new Chat().system("You complete Python code.").user("def add(a, b):");
    var answer = CLIENT.generate(Request.chat(chat).maxTokens(12).temperature(0));
    chat.assistant(answer.text()).user("def is_even(n):");
    var next = Request.chat(chat).maxTokens(12).temperature(0);
    assertTrue(CLIENT.tokenize(next).size() > CLIENT.tokenize(Request.text(answer.text())).size());
    assertEquals(12, CLIENT.generate(next).usage().outputTokens());
  }

  @Test
  void textAndItsIdsAreTheSamePrompt() {
    var ids = CLIENT.tokenize(Request.text("import os"));
    assertEquals("import os", CLIENT.detokenize(ids));
    var byIds = CLIENT.generate(Request.tokenIds(ids).maxTokens(8).temperature(0));
    assertEquals(CLIENT.generate(Request.text("import os").maxTokens(8).temperature(0)).text(), byIds.text());
  }

  @Test
  void theDefaultModelIsTheFirst() {
    var model = CLIENT.models().get(0);
    assertEquals(model, CLIENT.model(""));
    assertEquals("READY", model.state());
    assertTrue(model.features().contains("MULTIPLEX"));
    assertTrue(model.limits().get("max_logprobs") >= 20);
  }

  @Test
  void aUnixSocketServesTheSame() {
    try (var sidecar = Client.connect(Replicas.ONE.unixTarget())) {
      assertTrue(sidecar.isReady());
      assertEquals(CLIENT.generate(greedy(8)).text(), sidecar.generate(greedy(8)).text());
    }
  }

  @Test
  void leavingABlockFreesTheServer() throws Exception {
    try (var stream = CLIENT.stream(greedy(3000))) {
      assertNotNull(stream.next());
    }
    Replicas.ONE.awaitIdle();
  }

  @Test
  void droppingAStreamFreesTheServer() throws Exception {
    CLIENT.stream(greedy(3000)).next();
    for (int i = 0; i < 100 && Replicas.ONE.load().getRunningRequests() > 0; i++) {
      System.gc();
      Thread.sleep(20);
    }
    Replicas.ONE.awaitIdle();
  }

  @Test
  void cancellingAFutureOrASubscriptionFreesTheServer() throws Exception {
    var future = CLIENT.generateAsync(greedy(3000));
    var collector = new Collector(1);
    CLIENT.publish(greedy(3000)).subscribe(collector);
    collector.first.get(60, TimeUnit.SECONDS);
    future.cancel(true);
    collector.subscription.cancel();
    Replicas.ONE.awaitIdle();
    assertFalse(collector.text.isDone());
  }

  @Test
  void aCancelFromAnotherThreadEndsTheLoop() {
    try (var stream = CLIENT.stream(greedy(3000))) {
      stream.next();
      CompletableFuture.runAsync(stream::cancel);
      assertThrows(PhotonException.Cancelled.class, () -> stream.forEach(delta -> {}));
    }
  }

  @Test
  void anInterruptEndsTheRequest() throws Exception {
    var thread = Thread.currentThread();
    try (var stream = CLIENT.stream(greedy(3000))) {
      stream.next();
      CompletableFuture.runAsync(thread::interrupt);
      assertThrows(PhotonException.Cancelled.class, () -> stream.forEach(delta -> {}));
    }
    assertTrue(Thread.interrupted());
    Replicas.ONE.awaitIdle();
  }

  @Test
  void aDeadlineEndsACallOnBothSides() throws Exception {
    var request = greedy(4000).timeout(Duration.ofMillis(300));
    assertThrows(PhotonException.DeadlinePassed.class, () -> CLIENT.generate(request));
    assertThrows(PhotonException.DeadlinePassed.class, () -> CLIENT.stream(request).forEach(delta -> {}));
    try (var hasty = Client.builder(Replicas.ONE.target).defaultTimeout(Duration.ofMillis(300)).build()) {
      assertThrows(PhotonException.DeadlinePassed.class, () -> hasty.generate(greedy(4000)));
      assertEquals(2, hasty.generate(greedy(2).timeout(Duration.ofSeconds(60))).usage().outputTokens());
    }
    Replicas.ONE.awaitIdle();
  }

  /** Asks for so many deltas at a time. */
  private static final class Collector implements Flow.Subscriber<Delta> {
    final CompletableFuture<String> text = new CompletableFuture<>();
    final CompletableFuture<Delta> first = new CompletableFuture<>();
    private final StringBuilder joined = new StringBuilder();
    private final long batch;
    Flow.Subscription subscription;

    Collector(long batch) {
      this.batch = batch;
    }

    @Override
    public void onSubscribe(Flow.Subscription subscription) {
      this.subscription = subscription;
      subscription.request(batch);
    }

    @Override
    public void onNext(Delta delta) {
      first.complete(delta);
      joined.append(delta.text());
      subscription.request(batch);
    }

    @Override
    public void onError(Throwable failure) {
      text.completeExceptionally(failure);
    }

    @Override
    public void onComplete() {
      text.complete(joined.toString());
    }
  }
}
