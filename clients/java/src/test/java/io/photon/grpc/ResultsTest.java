package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.acme.v1.Invoice;
import com.acme.v1.Money;
import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import com.google.protobuf.Timestamp;
import com.google.protobuf.UnknownFieldSet;
import io.grpc.Status;
import io.photon.grpc.ScriptedServer.Script;
import io.photon.grpc.v1.Annotations;
import io.photon.grpc.v1.ErrorReason;
import io.photon.grpc.v1.Feature;
import io.photon.grpc.v1.GenerateResponse;
import io.photon.grpc.v1.GenerationStart;
import io.photon.grpc.v1.MultiplexItem;
import io.photon.grpc.v1.StreamGenerateResponse;
import io.photon.grpc.v1.TypedMessage;
import java.time.Duration;
import java.time.Instant;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** What comes out of the server's messages, also those of a newer one. */
@Timeout(60)
class ResultsTest {
  /** Field 900 and a value that no enum has. */
  private static final UnknownFieldSet NEWER =
      UnknownFieldSet.newBuilder().addField(900, UnknownFieldSet.Field.newBuilder().addVarint(7).build()).build();

  private static final int NEW_VALUE = 999;

  private static io.photon.grpc.v1.Output.Builder part(String text, int token) {
    var call = io.photon.grpc.v1.ToolCall.newBuilder().setIndex(token).setId("id" + token);
    return io.photon.grpc.v1.Output.newBuilder()
        .setIndex(1)
        .setText(text)
        .setReasoning("r" + text)
        .setContent("c" + text)
        .addTokenIds(token)
        .addScores(io.photon.grpc.v1.TokenScore.newBuilder().setTokenId(token))
        .addToolCalls(call);
  }

  @Test
  void partsJoinAsTheOptionsOfTheirFieldsSay() {
    var last = part("b", 2);
    last.getFinishBuilder().setStopString("b");
    last.getMessageBuilder().setTypeUrl("type.googleapis.com/acme.v1.Money");
    last.getUsageBuilder().setOutputTokens(2);
    var parts = List.of(part("a", 1).build(), last.setUnknownFields(NEWER).build());
    var whole = io.photon.grpc.v1.Output.newBuilder();
    parts.forEach(part -> Joins.join(whole, part));
    for (var field : io.photon.grpc.v1.Output.getDescriptor().getFields()) {
      assertEquals(joined(field, parts), whole.getField(field), field.getName());
    }
    assertEquals(NEWER, whole.getUnknownFields());
  }

  private static Object joined(FieldDescriptor field, List<io.photon.grpc.v1.Output> parts) {
    return switch (field.getOptions().getExtension(Annotations.delta)) {
      case DELTA_KEY, DELTA_ONCE -> parts.get(1).getField(field);
      case DELTA_APPEND -> field.isRepeated()
          ? parts.stream().flatMap(part -> ((List<?>) part.getField(field)).stream()).toList()
          : parts.get(0).getField(field).toString() + parts.get(1).getField(field);
      default -> throw new AssertionError(field.getName() + " does not say how it joins");
    };
  }

  @Test
  void aResultSaysWhenAndByWhichReleaseAndCountsEachOutput() throws Exception {
    var start = GenerationStart.newBuilder().setRelease("9.8.7").setCreateTime(Timestamp.newBuilder().setSeconds(5));
    var told = ScriptedServer.DONE.toBuilder().setStart(start);
    told.getDeltasBuilder(0).getUsageBuilder().setOutputTokens(4).setDraftTokens(3).setAcceptedDraftTokens(2);
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      server.script = request -> Script.of(told.build());
      var whole = many.generate(Request.text("x"));
      assertEquals(Instant.ofEpochSecond(5), whole.createTime());
      assertEquals("9.8.7", whole.release());
      assertEquals(new OutputUsage(4, 3, 2), whole.outputs().get(0).usage());
      var stream = client.stream(Request.text("x"));
      assertEquals(new OutputUsage(4, 3, 2), stream.next().usage());
      assertEquals(Instant.ofEpochSecond(5), stream.start().createTime());
      assertEquals("9.8.7", stream.start().release());
      server.script = request -> Script.of(ScriptedServer.DONE);
      assertNull(many.generate(Request.text("x")).createTime());
      assertNull(many.generate(Request.text("x")).outputs().get(0).usage());
    }
    var unary = GenerateResponse.newBuilder().setRelease("9.8.7").setCreateTime(Timestamp.newBuilder().setSeconds(5));
    assertEquals(Instant.ofEpochSecond(5), Generation.of(unary.build(), false).createTime());
    assertEquals("9.8.7", Generation.of(unary.build(), false).release());
  }

  @Test
  void theTokensOfAnOutputAreThoseOfAllItsParts() {
    var progress = new Progress(Request.text("x").toProto());
    var first = StreamGenerateResponse.newBuilder().addDeltas(part("a", 1).addTokenIds(5));
    progress.take(first.setStart(GenerationStart.getDefaultInstance()).build());
    progress.rest();
    var last = part("b", 2);
    last.getUsageBuilder().setOutputTokens(1);
    var told = progress.take(StreamGenerateResponse.newBuilder().addDeltas(last).build());
    assertEquals(3, told.getDeltas(0).getUsage().getOutputTokens());
  }

  @Test
  void aTypedMessageIsUnpackedAsItsOwnTypeOnly() {
    var money = Money.newBuilder().setCurrency("EUR").build();
    var any = Any.pack(money);
    var typed = TypedMessage.newBuilder().setTypeUrl(any.getTypeUrl()).setValue(any.getValue()).build();
    assertEquals(any.toByteString(), typed.toByteString());
    assertEquals(money, TypedMessages.unpack(typed, Money.class));
    var output = Output.of(part("a", 1).setMessage(typed).build(), false);
    assertEquals(money, output.message(Money.class));
    var wrong = assertThrows(PhotonException.WrongMessageType.class, () -> output.message(Invoice.class));
    assertEquals("acme.v1.Money", wrong.got());
    assertEquals("acme.v1.Invoice", wrong.want());
    assertEquals("WRONG_MESSAGE_TYPE", wrong.reason());
    assertTrue(wrong instanceof PhotonException.MessageMismatch);
    var broken = typed.toBuilder().setValue(ByteString.copyFrom(new byte[] {10, 100})).build();
    var error = assertThrows(PhotonException.MessageMismatch.class, () -> TypedMessages.unpack(broken, Money.class));
    assertEquals(PhotonException.MessageMismatch.class, error.getClass());
    var none = Output.of(part("a", 1).build(), false);
    assertThrows(PhotonException.MessageMismatch.class, () -> none.message(Money.class));
  }

  @Test
  void anOutputIsTheNextTurnAndItsCallsAreAnswered() {
    var call = io.photon.grpc.v1.ToolCall.newBuilder().setName("add").setArgumentsJson("{}").setId("abc123def");
    var told = io.photon.grpc.v1.Output.newBuilder().setText("<tool>").setContent("Wait.").addToolCalls(call);
    var output = Output.of(told.build(), false);
    var plain = Output.of(io.photon.grpc.v1.Output.newBuilder().setText("Hello.").build(), false);
    var chat = new Chat().user("x").assistant(output).tool(output.toolCalls().get(0), "3").assistant(plain).toProto();
    assertEquals("Wait.", chat.getMessages(1).getContent());
    assertEquals("assistant", chat.getMessages(1).getRole());
    assertEquals(List.of(call.build()), chat.getMessages(1).getToolCallsList());
    assertEquals("tool", chat.getMessages(2).getRole());
    assertEquals("3", chat.getMessages(2).getContent());
    assertEquals("add", chat.getMessages(2).getName());
    assertEquals("abc123def", chat.getMessages(2).getToolCallId());
    assertEquals("Hello.", chat.getMessages(3).getContent());
  }

  @Test
  void optionsComeWhereTheProtoHasThem() {
    var tool = new Tool("add", "Adds.", "{\"type\":\"object\"}", false);
    var request = Request.chat(new Chat().user("x")).tools(tool).labels(Map.of("team", "search"));
    var proto = request.heartbeatInterval(Duration.ofSeconds(20)).toProto();
    assertEquals(Map.of("team", "search"), proto.getLabelsMap());
    assertEquals(20, proto.getStream().getHeartbeatInterval().getSeconds());
    assertEquals("add", proto.getChat().getTools(0).getName());
    assertTrue(proto.getChat().getTools(0).hasStrict());
    assertEquals("", proto.getChat().getToolsJson());
  }

  @Test
  void everyReasonOfTheApiHasAClassAndAValue() {
    for (var reason : ErrorReason.values()) {
      if (reason != ErrorReason.UNRECOGNIZED && reason != ErrorReason.ERROR_REASON_UNSPECIFIED) {
        var word = reason.name().substring("ERROR_REASON_".length());
        var error = PhotonException.of("", PhotonException.Facts.of(Status.Code.UNKNOWN, word));
        assertEquals(reason, error.errorReason());
        assertEquals(word.replace("_", ""), error.getClass().getSimpleName().toUpperCase(Locale.ROOT));
      }
    }
    var newer = PhotonException.of("", PhotonException.Facts.of(Status.Code.UNAVAILABLE, "NEW_REASON"));
    assertEquals(ErrorReason.ERROR_REASON_UNSPECIFIED, newer.errorReason());
    assertEquals("NEW_REASON", newer.reason());
    assertEquals(PhotonException.Unreachable.class, newer.getClass());
  }

  @Test
  void whatANewerServerSaysIsNoFailure() throws Exception {
    var newer = (StreamGenerateResponse) renewed(ScriptedServer.DONE);
    assertEquals(NEWER, newer.getDeltas(0).getFinish().getUnknownFields());
    try (var server = new ScriptedServer();
        var client = Client.connect(server.target());
        var many = client.multiplex()) {
      server.script = request -> Script.of(newer);
      for (var calls : List.of(client, many)) {
        assertEquals("999", calls.generate(Request.text("x")).finish().reason());
        var deltas = calls.stream(Request.text("x"));
        assertEquals("999", deltas.next().finish().reason());
      }
      // Messages that only have what is new are as little seen as heartbeats.
      var odd = StreamGenerateResponse.newBuilder().setUnknownFields(NEWER).build();
      server.script = request -> Script.of(odd, newer);
      assertEquals("done", client.stream(Request.text("x")).next().text());
      assertEquals("done", many.generate(Request.text("x")).text());
      server.features = Stream.of(Feature.values()).filter(each -> each != Feature.UNRECOGNIZED).toList();
      assertTrue(client.model("").features().contains("UNKNOWN_FIELDS_REFUSED"));
    }
    var item = MultiplexItem.newBuilder().setUnknownFields(NEWER).build();
    assertEquals(MultiplexItem.ItemCase.ITEM_NOT_SET, item.getItemCase());
  }

  /** The message with an unknown field at every depth, and a new value of every enum. */
  private static Message renewed(Message message) {
    var newer = message.toBuilder();
    message
        .getAllFields()
        .forEach(
            (field, value) -> {
              var isMessage = field.getJavaType() == FieldDescriptor.JavaType.MESSAGE;
              if (isMessage && field.isRepeated()) {
                var count = message.getRepeatedFieldCount(field);
                IntStream.range(0, count)
                    .forEach(i -> newer.setRepeatedField(field, i, renewed((Message) ((List<?>) value).get(i))));
              } else if (isMessage) {
                newer.setField(field, renewed((Message) value));
              } else if (field.getJavaType() == FieldDescriptor.JavaType.ENUM) {
                newer.setField(field, field.getEnumType().findValueByNumberCreatingIfUnknown(NEW_VALUE));
              }
            });
    return newer.setUnknownFields(NEWER).build();
  }
}
