package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.acme.v1.Invoice;
import com.acme.v1.Money;
import com.google.gson.JsonParser;
import com.google.protobuf.ByteString;
import com.google.protobuf.DescriptorProtos.FileDescriptorProto;
import com.google.protobuf.DescriptorProtos.FileDescriptorSet;
import io.photon.grpc.v1.StructuredOutput;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.Test;

/** Messages instead of text, from a server with the embedded model. */
class TypedTest {
  private static final Client CLIENT = Client.connect(Replicas.ONE.target);

  @AfterAll
  static void close() {
    CLIENT.close();
  }

  private static Request request(int seed) {
    return Request.text("Money, one euro: ").temperature(1).seed(seed).maxTokens(200);
  }

  @Test
  void theClassThatIsPassedComesBack() throws Exception {
    Money money = CLIENT.generate(request(1), Money.class);
    assertEquals(money, CLIENT.generateAsync(request(1), Money.class).get(60, TimeUnit.SECONDS));
    try (var many = CLIENT.multiplex()) {
      assertEquals(money, many.generate(request(1), Money.class));
    }
  }

  @Test
  void aStreamOfMessagesFillsTheLast() {
    for (int seed = 0; seed < 5; seed++) {
      var messages = new ArrayList<Money>();
      try (var stream = CLIENT.stream(request(seed), Money.class)) {
        stream.forEach(messages::add);
        assertTrue(stream.deltas().usage().outputTokens() > 0);
      }
      var last = messages.get(messages.size() - 1);
      assertEquals(CLIENT.generate(request(seed), Money.class), last);
      messages.forEach(partial -> assertTrue(last.getCurrency().startsWith(partial.getCurrency())));
    }
  }

  @Test
  void anOutputThatIsCutIsNoMessage() {
    // An empty invoice is a whole one, but not every draw is.
    var cut = IntStream.range(0, 20).mapToObj(seed -> request(seed).maxTokens(2)).filter(TypedTest::isCut).findFirst();
    var error =
        assertThrows(PhotonException.MessageMismatch.class, () -> CLIENT.generate(cut.orElseThrow(), Invoice.class));
    assertTrue(error.getMessage().contains("MAX_TOKENS"), error.getMessage());
    try (var stream = CLIENT.stream(cut.orElseThrow(), Invoice.class)) {
      assertThrows(PhotonException.MessageMismatch.class, () -> stream.forEach(message -> {}));
    }
  }

  private static boolean isCut(Request request) {
    try {
      CLIENT.generate(request, Invoice.class);
      return false;
    } catch (PhotonException.MessageMismatch cut) {
      return true;
    }
  }

  @Test
  void theDescriptorsHoldWhatTheClassImports() throws Exception {
    var described = MessageType.of(Invoice.class).describe();
    var files = FileDescriptorSet.parseFrom(described.getFileDescriptorSet()).getFileList();
    assertEquals("acme.v1.Invoice", described.getMessageType());
    assertEquals(
        List.of("acme/v1/invoice.proto", "acme/v1/money.proto"),
        files.stream().map(FileDescriptorProto::getName).toList());
  }

  @Test
  void aServerTakesTheDigestOfASetThatItHas() throws Exception {
    var padding = FileDescriptorProto.newBuilder().setName("padding.proto");
    padding.addMessageTypeBuilder().setName("P".repeat(Dispatch.MAX_SET_BYTES));
    var set = FileDescriptorSet.parseFrom(MessageType.of(Money.class).describe().getFileDescriptorSet()).toBuilder();
    var bytes = set.addFile(padding).build().toByteString();
    var digest = ByteString.copyFrom(MessageDigest.getInstance("SHA-256").digest(bytes.toByteArray()));
    var described = StructuredOutput.Protobuf.newBuilder().setMessageType("acme.v1.Money");
    var whole = described.clone().setFileDescriptorSet(bytes).build();
    var byDigest = described.clone().setFileDescriptorSetSha256(digest).build();
    Money money = null;
    for (var type : List.of(whole, whole, byDigest)) {
      var typed = request(1).with(message -> message.getStructuredOutputBuilder().setProtobuf(type));
      var answer = CLIENT.generate(typed).outputs().get(0).message(Money.class);
      assertTrue(money == null || money.equals(answer));
      money = answer;
    }
  }

  @Test
  void argumentsOfAToolCallAreAMessage() {
    var call = new ToolCall(0, "Money", "{\"currency\":\"EUR\",\"cents\":\"150\"}", "");
    assertEquals(Money.newBuilder().setCurrency("EUR").setCents(150).build(), call.arguments(Money.class));
    var broken = new ToolCall(0, "Money", "{\"colour\":1}", "");
    assertThrows(PhotonException.MessageMismatch.class, () -> broken.arguments(Money.class));
  }

  @Test
  void aToolIsDescribedByItsMessage() {
    var chat = new Chat().user("What is it?");
    var request = Request.chat(chat).tools(Map.of(Invoice.class, "Writes an invoice."));
    var tool = request.toProto().getChat().getTools(0);
    var fields = JsonParser.parseString(tool.getParametersJson()).getAsJsonObject().getAsJsonObject("properties");
    assertEquals("Invoice", tool.getName());
    assertEquals("Writes an invoice.", tool.getDescription());
    assertFalse(tool.hasStrict());
    assertEquals("date-time", fields.getAsJsonObject("issued").get("format").getAsString());
    assertEquals("boolean", fields.getAsJsonObject("isPaid").get("type").getAsString());
    assertEquals("array", fields.getAsJsonObject("items").get("type").getAsString());
    assertFalse(CLIENT.tokenize(request).isEmpty());
  }
}
