package io.photon.grpc;

import static io.photon.grpc.ScriptedServer.DONE;
import static io.photon.grpc.ScriptedServer.failure;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.ByteString;
import io.grpc.Status;
import io.photon.grpc.ScriptedServer.Script;
import io.photon.grpc.v1.ChatMessage;
import io.photon.grpc.v1.ContentPart;
import io.photon.grpc.v1.Feature;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.GenerationStart;
import java.security.MessageDigest;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Function;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** What is sent to which server: fields that an older one would ignore, and descriptor sets or their digests. */
@Timeout(60)
class DispatchTest {
  private static final Request TOOLS =
      Request.chat(new Chat().user("x")).tools(new Tool("add", "Adds.", "{}"));

  private static final Map<String, Request> CAUTIOUS =
      Map.of(
          "chat.tools",
          TOOLS,
          "chat.messages[1].tool_calls",
          Request.chat(
              new Chat()
                  .user("x")
                  .add(ChatMessage.newBuilder().addToolCalls(new ToolCall(0, "add", "{}", "a").toProto()))),
          "chat.messages[0].parts",
          Request.chat(new Chat().add(ChatMessage.newBuilder().addParts(ContentPart.newBuilder().setText("x")))),
          "structured_output.protobuf.file_descriptor_set_sha256",
          typed(ByteString.EMPTY, ByteString.copyFrom(new byte[32])));

  private static final ByteString SET = ByteString.copyFrom(new byte[Dispatch.MAX_SET_BYTES + 1]);
  private static final Request TYPED = typed(SET, ByteString.EMPTY);

  private static Request typed(ByteString set, ByteString digest) {
    var message = GenerateRequest.newBuilder().setText("x");
    var type = message.getStructuredOutputBuilder().getProtobufBuilder().setMessageType("acme.v1.Invoice");
    type.setFileDescriptorSet(set).setFileDescriptorSetSha256(digest);
    return Request.of(message.build());
  }

  private static final List<Function<Request, String>> calls(Client client, Multiplex many) {
    return List.of(
        request -> client.generate(request).text(),
        request -> Generator.await(client.generateAsync(request)).text(),
        request -> client.stream(request).next().text(),
        request -> client.generate(request.with(copy -> {}).hedgeAfter(Duration.ofSeconds(30))).text(),
        request -> many.generate(request).text(),
        request -> many.stream(request).next().text());
  }

  @Test
  void aFieldThatAnOlderServerWouldIgnoreIsNotSent() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      server.features = List.of(Feature.FEATURE_CHAT);
      CAUTIOUS.forEach(
          (field, request) -> {
            for (var call : calls(client, many)) {
              var error = assertThrows(PhotonException.FeatureNotSupported.class, () -> call.apply(request));
              assertEquals(field, error.field());
              assertTrue(error.getMessage().contains("FEATURE_UNKNOWN_FIELDS_REFUSED"), error.getMessage());
            }
          });
      assertThrows(PhotonException.FeatureNotSupported.class, () -> client.tokenize(TOOLS));
      assertEquals(List.of(), server.requests);
      assertEquals(0, server.tokenized.get());
      assertEquals(1, server.asked.get());
    }
  }

  @Test
  void featuresAreAskedForOnceAndOnlyWhereTheyMatter() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      for (var call : calls(client, many)) {
        assertEquals("done", call.apply(Request.text("x")));
      }
      assertEquals(List.of(1), client.tokenize(Request.chat(new Chat().user("x")).toolsJson("[]")));
      assertEquals(0, server.asked.get());
      var futures = Stream.generate(() -> client.generateAsync(TOOLS)).limit(20).toList();
      futures.forEach(Generator::await);
      for (var call : calls(client, many)) {
        for (var request : CAUTIOUS.values()) {
          assertEquals("done", call.apply(request));
        }
      }
      assertEquals(List.of(1), client.tokenize(TOOLS));
      assertEquals(1, server.asked.get());
    }
  }

  /** One replica was asked; another one answers. */
  @Test
  void anAnswerOfAnOlderReplicaIsNoAnswer() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      server.script = request -> Script.of(DONE.toBuilder().setStart(GenerationStart.getDefaultInstance()).build());
      for (var call : calls(client, many)) {
        var error = assertThrows(PhotonException.FeatureNotSupported.class, () -> call.apply(TOOLS));
        assertEquals("chat.tools", error.field());
        assertEquals("done", call.apply(Request.text("x")));
      }
    }
  }

  @Test
  void aDigestThatAnOlderReplicaIgnoresIsSentAsItsSet() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      var field = "structured_output.protobuf.file_descriptor_set";
      var noSet = Script.failing(failure(Status.Code.INVALID_ARGUMENT, "INVALID_REQUEST", field));
      client.generate(TYPED);
      for (var call : calls(client, many)) {
        server.script = request -> hasSet(request) ? Script.of(DONE) : noSet;
        for (int i = 0; i < 20; i++) {
          assertEquals("done", call.apply(TYPED));
        }
      }
      assertTrue(server.requests.stream().anyMatch(request -> !hasSet(request)));
      server.script = request -> noSet;
      assertThrows(PhotonException.InvalidRequest.class, () -> client.generate(TYPED));
    }
  }

  @Test
  void aRequestWithADigestThatIsWrongOtherwiseIsNotSentAgain() throws Exception {
    var refusals =
        List.of(
            failure(Status.Code.INVALID_ARGUMENT, "INVALID_REQUEST", "sampling.top_p"),
            failure(Status.Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "prompt"),
            failure(
                Status.Code.INVALID_ARGUMENT, "INVALID_CONSTRAINT", "structured_output.protobuf.file_descriptor_set"));
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      client.generate(TYPED);
      for (var refusal : refusals) {
        server.script = request -> Script.failing(refusal);
        for (var call : calls(client, many)) {
          server.requests.clear();
          assertThrows(PhotonException.InvalidRequest.class, () -> call.apply(TYPED));
          assertEquals(List.of(false), server.requests.stream().map(DispatchTest::hasSet).toList());
        }
      }
    }
  }

  @Test
  void aServerWithoutModelsIsOldAndAFailureToAskIsNoAnswer() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.builder(server.target()).retries(0).build();
        var many = client.multiplex()) {
      server.modelFailure = failure(Status.Code.PERMISSION_DENIED, "SCOPE_REQUIRED");
      for (var call : calls(client, many)) {
        assertThrows(PhotonException.ScopeRequired.class, () -> call.apply(TOOLS));
      }
      server.modelFailure = failure(Status.Code.UNIMPLEMENTED, "X");
      assertThrows(PhotonException.FeatureNotSupported.class, () -> client.generate(TOOLS));
      assertEquals(List.of(), server.requests);
    }
  }

  @Test
  void aServerIsAskedAgainAfterItsConnectionWasLost() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target())) {
      server.features = List.of();
      assertThrows(PhotonException.FeatureNotSupported.class, () -> client.generate(TOOLS));
      server.features = List.of(Feature.FEATURE_UNKNOWN_FIELDS_REFUSED);
      server.restart();
      client.reconnect();
      client.waitUntilReady(Duration.ofSeconds(20));
      client.generate(Request.text("x"));
      assertEquals("done", client.generate(TOOLS).text());
    }
  }

  @Test
  void aCancelledCallIsNotSentOnceTheFeaturesAreKnown() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target())) {
      var stream = client.stream(TOOLS);
      stream.cancel();
      assertThrows(PhotonException.Cancelled.class, stream::next);
      var future = client.generateAsync(Request.text("x"));
      future.cancel(true);
      assertTrue(future.isCancelled());
      assertFalse(server.requests.stream().anyMatch(GenerateRequest::hasChat));
    }
  }

  @Test
  void aLargeSetIsSentOnceThenByItsDigest() throws Exception {
    var digest = ByteString.copyFrom(MessageDigest.getInstance("SHA-256").digest(SET.toByteArray()));
    for (int first = 0; first < 6; first++) {
      try (var server = new ScriptedServer();
          var client = Client.connect(server.target());
          var many = client.multiplex()) {
        var calls = calls(client, many);
        calls.get(first).apply(TYPED);
        calls.forEach(call -> call.apply(TYPED));
        assertTrue(hasSet(server.requests.get(0)));
        for (var request : server.requests.subList(1, server.requests.size())) {
          assertFalse(hasSet(request));
          assertEquals(digest, request.getStructuredOutput().getProtobuf().getFileDescriptorSetSha256());
          assertEquals("acme.v1.Invoice", request.getStructuredOutput().getProtobuf().getMessageType());
        }
        assertEquals(7, server.requests.size());
      }
    }
  }

  @Test
  void aSmallSetIsSentAlways() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target())) {
      var small = typed(SET.substring(1), ByteString.EMPTY);
      client.generate(small);
      client.generate(small);
      assertTrue(server.requests.stream().allMatch(DispatchTest::hasSet));
      assertEquals(0, server.asked.get());
    }
  }

  @Test
  void aServerThatLostASetGetsItOnceMoreAndNotTwice() throws Exception {
    for (int which = 0; which < 6; which++) {
      try (var server = new ScriptedServer();
          var client = Client.connect(server.target());
          var many = client.multiplex()) {
        var call = calls(client, many).get(which);
        call.apply(TYPED);
        server.script = request -> hasSet(request) ? Script.of(DONE) : unknown();
        assertEquals("done", call.apply(TYPED));
        assertEquals(List.of(true, false, true), server.requests.stream().map(DispatchTest::hasSet).toList());
      }
      try (var server = new ScriptedServer();
          var client = Client.connect(server.target());
          var many = client.multiplex()) {
        var call = calls(client, many).get(which);
        call.apply(TYPED);
        server.script = request -> unknown();
        assertThrows(PhotonException.DescriptorSetUnknown.class, () -> call.apply(TYPED));
        assertEquals(List.of(true, false, true), server.requests.stream().map(DispatchTest::hasSet).toList());
      }
    }
  }

  @Test
  void replicasInTurnEachLearnASet() throws Exception {
    try (var one = new ScriptedServer();
        var other = new ScriptedServer();
        var client = Client.connect("ipv4:" + one.target() + "," + other.target())) {
      for (var server : List.of(one, other)) {
        Set<ByteString> known = ConcurrentHashMap.newKeySet();
        server.script =
            request -> {
              if (!hasSet(request) && known.isEmpty()) {
                return unknown();
              }
              known.add(SET);
              return Script.of(DONE);
            };
      }
      for (int i = 0; i < 40; i++) {
        assertEquals("done", client.generate(TYPED).text());
      }
      for (var server : List.of(one, other)) {
        var last = server.requests.subList(server.requests.size() - 5, server.requests.size());
        assertFalse(last.stream().anyMatch(DispatchTest::hasSet));
      }
    }
  }

  @Test
  void aServerThatKnowsNoDigestsGetsTheSet() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      server.features = List.of();
      for (int i = 0; i < 2; i++) {
        calls(client, many).forEach(call -> assertEquals("done", call.apply(TYPED)));
      }
      assertTrue(server.requests.stream().allMatch(DispatchTest::hasSet));
      assertEquals(1, server.asked.get());
    }
  }

  @Test
  void aServerThatMayNotBeAskedGetsTheSet() throws Exception {
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target())) {
      server.modelFailure = failure(Status.Code.PERMISSION_DENIED, "SCOPE_REQUIRED");
      for (int i = 0; i < 3; i++) {
        assertEquals("done", client.generate(TYPED).text());
      }
      assertTrue(server.requests.stream().allMatch(DispatchTest::hasSet));
      assertEquals(1, server.asked.get());
    }
  }

  private static boolean hasSet(GenerateRequest request) {
    return !request.getStructuredOutput().getProtobuf().getFileDescriptorSet().isEmpty();
  }

  private static Script unknown() {
    return Script.failing(failure(Status.Code.FAILED_PRECONDITION, "DESCRIPTOR_SET_UNKNOWN"));
  }
}
