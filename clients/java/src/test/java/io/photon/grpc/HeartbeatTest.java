package io.photon.grpc;

import static io.photon.grpc.ScriptedServer.DONE;
import static io.photon.grpc.ScriptedServer.HEARTBEAT;
import static io.photon.grpc.ScriptedServer.failure;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.photon.grpc.ScriptedServer.Script;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Flow;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** Messages with a sequence alone, before the first token. */
@Timeout(60)
class HeartbeatTest {
  private static final Request REQUEST = Request.text("x");

  /** More of them than a reader asks for ahead. */
  private static Script slowly() {
    var messages = new ArrayList<>(Collections.nCopies(20, HEARTBEAT));
    messages.add(DONE);
    return new Script(messages, null);
  }

  @Test
  void nobodySeesThem() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      server.script = request -> slowly();
      for (var calls : List.of(client, many)) {
        var deltas = new ArrayList<Delta>();
        calls.stream(REQUEST).forEach(deltas::add);
        assertEquals(List.of("done"), deltas.stream().map(Delta::text).toList());
        assertEquals(List.of("done"), published(calls));
      }
      assertEquals("done", many.generate(REQUEST).text());
    }
  }

  @Test
  void aCallThatFailsAfterThemIsSentAgain() throws Exception {
    var full = failure(Status.Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT");
    var lost = failure(Status.Code.UNAVAILABLE, "ENGINE_RESTARTING");
    for (var resume : List.of(true, false)) {
      for (var end : List.of(full, lost)) {
        try (var server = new ScriptedServer();
            var client = Client.builder(server.target()).resume(resume).build()) {
          server.script =
              request -> server.requests.size() < 3 ? Script.failing(end, HEARTBEAT, HEARTBEAT) : Script.of(DONE);
          assertEquals("done", client.stream(REQUEST).next().text());
          assertEquals(3, server.requests.size());
          // Nothing was received: several outputs can be asked for again as well.
          server.requests.clear();
          assertEquals("done", client.stream(Request.text("x").numOutputs(2)).next().text());
        }
      }
    }
  }

  @Test
  void theIdOfALostAttemptMayStillBeInFlight() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.builder(server.target()).resume(false).build()) {
      server.script =
          request ->
              switch (server.requests.size()) {
                case 1 -> Script.failing(failure(Status.Code.UNAVAILABLE, "ENGINE_RESTARTING"), HEARTBEAT);
                case 2 -> Script.failing(failure(Status.Code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"), HEARTBEAT);
                default -> Script.of(DONE);
              };
      assertEquals("done", client.stream(REQUEST).next().text());
    }
  }

  @Test
  void aCallThatFailsAfterThemIsSentAsOftenAsThePolicySays() throws Exception {
    var end = failure(Status.Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT");
    try (var server = new ScriptedServer();
        var client = Client.builder(server.target()).retries(2).build();
        var once = Client.builder(server.target()).retries(0).resume(false).build()) {
      server.script = request -> Script.failing(end, HEARTBEAT);
      assertThrows(PhotonException.QueueTimeout.class, () -> client.stream(REQUEST).next());
      assertEquals(3, server.requests.size());
      assertThrows(PhotonException.QueueTimeout.class, () -> once.stream(REQUEST).next());
      assertEquals(4, server.requests.size());
      server.script = request -> Script.failing(failure(Status.Code.INVALID_ARGUMENT, "INVALID_REQUEST"), HEARTBEAT);
      assertThrows(PhotonException.InvalidRequest.class, () -> client.stream(REQUEST).next());
      assertEquals(5, server.requests.size());
      server.script = request -> Script.failing(forbidden(), HEARTBEAT);
      assertThrows(PhotonException.QueueTimeout.class, () -> client.stream(REQUEST).next());
      assertEquals(6, server.requests.size());
    }
  }

  @Test
  void aSubscriberOfAClosedClientIsTold() throws Exception {
    try (var server = new ScriptedServer()) {
      for (var resume : List.of(true, false)) {
        var client = Client.builder(server.target()).resume(resume).build();
        client.close();
        var error = assertThrows(ExecutionException.class, () -> published(client));
        assertEquals(PhotonException.Closed.class, error.getCause().getClass());
      }
    }
  }

  private static StatusRuntimeException forbidden() {
    var end = failure(Status.Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT");
    end.getTrailers().put(Metadata.Key.of("grpc-retry-pushback-ms", Metadata.ASCII_STRING_MARSHALLER), "-1");
    return end;
  }

  private static List<String> published(Generator calls) throws Exception {
    var texts = new ArrayList<String>();
    var over = new CompletableFuture<List<String>>();
    calls
        .publish(REQUEST)
        .subscribe(
            new Flow.Subscriber<>() {
              @Override
              public void onSubscribe(Flow.Subscription subscription) {
                subscription.request(1);
              }

              @Override
              public void onNext(Delta delta) {
                texts.add(delta.text());
              }

              @Override
              public void onError(Throwable failure) {
                over.completeExceptionally(failure);
              }

              @Override
              public void onComplete() {
                over.complete(texts);
              }
            });
    return over.get(20, TimeUnit.SECONDS);
  }
}
