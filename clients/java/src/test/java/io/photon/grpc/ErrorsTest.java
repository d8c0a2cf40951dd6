package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import io.photon.grpc.v1.Feature;
import io.photon.grpc.v1.ModelState;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.Test;

/** Refusals as exceptions, with their numbers and fields. */
class ErrorsTest {
  private static final Client CLIENT = Client.connect(Replicas.ONE.target);

  @AfterAll
  static void close() {
    CLIENT.close();
  }

  @Test
  void bothNumbersOfAPromptThatIsTooLong() {
    var context = CLIENT.model("").maxContextTokens();
    var request = Request.text("x").maxTokens(context + 1);
    var error = assertThrows(PhotonException.PromptTooLong.class, () -> CLIENT.generate(request));
    assertEquals(context, error.limit());
    assertTrue(error.needed() > context);
    assertEquals("PROMPT_TOO_LONG", error.reason());
    assertEquals(Status.Code.INVALID_ARGUMENT, error.code());
    assertNull(error.retryAfter());
  }

  @Test
  void theFieldThatIsWrong() {
    var request = Request.text("x").topP(0);
    for (var error :
        new PhotonException[] {
          assertThrows(PhotonException.InvalidRequest.class, () -> CLIENT.generate(request)),
          assertThrows(PhotonException.InvalidRequest.class, () -> CLIENT.stream(request).next())
        }) {
      assertEquals("sampling.top_p", error.field());
      assertEquals("sampling.top_p", error.violations().get(0).field());
      assertTrue(!error.violations().get(0).description().isEmpty());
    }
  }

  @Test
  void aFutureFailsWithTheSame() {
    var failed = CLIENT.generateAsync(Request.text("x").model("none"));
    assertTrue(failed.handle((value, error) -> error).join().getCause() instanceof PhotonException.ModelNotFound);
  }

  @Test
  void anOptionOfAChatNeedsAChat() {
    var error = assertThrows(PhotonException.InvalidRequest.class, () -> Request.text("x").toolsJson("[]"));
    assertEquals("chat.tools_json", error.field());
  }

  @Test
  void noServerAtTheTarget() {
    try (var nowhere = Client.builder("127.0.0.1:1").retries(0).build()) {
      assertThrows(PhotonException.Unreachable.class, () -> nowhere.generate(Request.text("x")));
      assertThrows(PhotonException.Unreachable.class, () -> nowhere.stream(Request.text("x")).next());
      assertThrows(PhotonException.Unreachable.class, () -> nowhere.waitUntilReady(Duration.ofMillis(200)));
    }
  }

  @Test
  void aReasonOfANewerServerKeepsItsWordAndIsTakenByItsCode() {
    var info = ErrorInfo.newBuilder().setDomain("photon-grpc").setReason("NEW_REASON").putMetadata("needed", "7");
    var delay = RetryInfo.newBuilder().setRetryDelay(Durations.write(Duration.ofMillis(1500)));
    var status =
        com.google.rpc.Status.newBuilder()
            .setCode(Status.Code.RESOURCE_EXHAUSTED.value())
            .setMessage("later")
            .addDetails(Any.pack(info.build()))
            .addDetails(Any.pack(delay.build()))
            .build();
    var error = Statuses.error(StatusProto.toStatusRuntimeException(status));
    assertEquals(PhotonException.Overloaded.class, error.getClass());
    assertEquals("NEW_REASON", error.reason());
    assertEquals(7, error.needed());
    assertEquals(Duration.ofMillis(1500), error.retryAfter());
  }

  @Test
  void aNumberWithAFractionIsKeptAndCutTowardZeroWhereItIsWhole() {
    assertNumbers("-1.5", -1L, -1.5);
    assertNumbers("2.0", 2L, 2.0);
    assertNumbers("9007199254740993", 9007199254740993L, 9007199254740992.0);
    // More than a long holds.
    assertNumbers("18446744073709551615", null, 18446744073709551616.0);
    assertNumbers("many", null, null);
    assertNumbers("", null, null);
  }

  private static void assertNumbers(String sent, Long whole, Double value) {
    var info = ErrorInfo.newBuilder().setDomain("photon-grpc").setReason("INVALID_REQUEST");
    var status =
        com.google.rpc.Status.newBuilder()
            .setCode(Status.Code.INVALID_ARGUMENT.value())
            .addDetails(Any.pack(info.putMetadata("needed", sent).putMetadata("limit", sent).build()))
            .build();
    var error = Statuses.error(StatusProto.toStatusRuntimeException(status));
    assertEquals(Arrays.asList(whole, whole), Arrays.asList(error.needed(), error.limit()));
    assertEquals(Arrays.asList(value, value), Arrays.asList(error.neededValue(), error.limitValue()));
  }

  @Test
  void aPushbackThatIsNoNumberForbidsARetry() {
    for (var sent : new String[] {"-1", "soon"}) {
      var trailers = new Metadata();
      trailers.put(Metadata.Key.of("grpc-retry-pushback-ms", Metadata.ASCII_STRING_MARSHALLER), sent);
      assertTrue(Statuses.error(Status.RESOURCE_EXHAUSTED, trailers).isFinal(), sent);
    }
    assertFalse(Statuses.error(Status.RESOURCE_EXHAUSTED, new Metadata()).isFinal());
  }

  @Test
  void aDeadlineIsToldInOurWords() throws Exception {
    try (var silent = new FakeServer(0, false);
        var client = Client.connect(silent.target())) {
      var hasty = Request.text("x").timeout(Duration.ofMillis(200));
      silent.standsAfter = 0;
      var whole = assertThrows(PhotonException.DeadlinePassed.class, () -> client.generate(hasty));
      assertEquals("the deadline has passed", whole.getMessage());
      assertEquals("DEADLINE_PASSED", whole.reason());
      assertTrue(whole.getCause().getMessage().startsWith("DEADLINE_EXCEEDED: "), whole.getCause().getMessage());
      var later = client.generateAsync(hasty).handle((value, error) -> error.getMessage()).join();
      assertTrue(later.endsWith("the deadline has passed"), later);
      var streamed = assertThrows(PhotonException.DeadlinePassed.class, () -> client.stream(hasty).hasNext());
      assertEquals("the deadline has passed", streamed.getMessage());
    }
  }

  @Test
  void aDeadlineThatCannotBeMetIsCaughtAsOneThatPassed() {
    var info = ErrorInfo.newBuilder().setDomain("photon-grpc").setReason("DEADLINE_UNREACHABLE").build();
    var status =
        com.google.rpc.Status.newBuilder()
            .setCode(Status.Code.DEADLINE_EXCEEDED.value())
            .setMessage("too late")
            .addDetails(Any.pack(info))
            .build();
    PhotonException error = Statuses.error(StatusProto.toStatusRuntimeException(status));
    assertTrue(error instanceof PhotonException.DeadlinePassed);
    assertEquals(PhotonException.DeadlineUnreachable.class, error.getClass());
    assertEquals("DEADLINE_UNREACHABLE", error.reason());
  }

  @Test
  void whatANewerServerNamesIsANumber() {
    var model = io.photon.grpc.v1.Model.newBuilder().setStateValue(99).addFeatures(Feature.FEATURE_CHAT);
    model.addFeaturesValue(98);
    assertEquals("99", Model.of(model.build()).state());
    assertEquals(List.of("CHAT", "98"), Model.of(model.build()).features());
    assertEquals("READY", Model.of(model.setState(ModelState.MODEL_STATE_READY).build()).state());
    var finish = io.photon.grpc.v1.Finish.newBuilder().setReasonValue(1234).build();
    assertEquals("1234", Finish.of(finish).reason());
  }

  @Test
  void aPushbackWithoutDetailsIsHeard() {
    var trailers = new Metadata();
    trailers.put(Metadata.Key.of("grpc-retry-pushback-ms", Metadata.ASCII_STRING_MARSHALLER), "250");
    var error = Statuses.error(Status.RESOURCE_EXHAUSTED, trailers);
    assertEquals(Duration.ofMillis(250), error.retryAfter());
    assertEquals(PhotonException.Overloaded.class, error.getClass());
  }
}
