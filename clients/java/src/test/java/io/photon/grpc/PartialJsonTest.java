package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.acme.v1.Invoice;
import com.acme.v1.Money;
import com.google.protobuf.Timestamp;
import com.google.protobuf.util.JsonFormat;
import java.util.Map;
import org.junit.jupiter.api.Test;

/** Every beginning of a message's JSON is a message that has no more than the whole. */
class PartialJsonTest {
  private static final Invoice WHOLE =
      Invoice.newBuilder()
          .setNumber("R\"1\\7 😀\n")
          .setIssued(Timestamp.newBuilder().setSeconds(1_714_694_400))
          .addItems(item("Stuhl", 2, 4990))
          .addItems(item("Tisch {groß}", 1, -123_456_789_012L))
          .putLabels("farbe", "grün, [matt]")
          .setIsPaid(true)
          .build();

  @Test
  void everyBeginningIsAMessage() throws Exception {
    for (var json : new String[] {compact(), compact().replace("😀", "\\ud83d\\ude00")}) {
      var partial = new PartialJson(Invoice.getDescriptor());
      for (int length = 0; length < json.length(); length++) {
        if (length > 0) {
          partial.append(json.substring(length - 1, length));
        }
        if (length == 0 || Character.isHighSurrogate(json.charAt(length - 1))) {
          continue;
        }
        assertBegins(MessageType.of(Invoice.class).read(partial.closed()));
      }
      partial.append(json.substring(json.length() - 1));
      assertEquals(WHOLE, MessageType.of(Invoice.class).read(partial.closed()));
    }
  }

  @Test
  void aStringGrowsAndANumberWaits() throws Exception {
    var partial = new PartialJson(Invoice.getDescriptor());
    partial.append("{\"number\":\"R1");
    assertEquals("R1", read(partial).getNumber());
    partial.append("7\",\"items\":[{\"name\":\"Stu");
    assertEquals("Stu", read(partial).getItems(0).getName());
    partial.append("hl\",\"quantity\":12");
    assertEquals(0, read(partial).getItems(0).getQuantity());
    partial.append("3,\"price\":{\"cents\":\"49");
    assertEquals(123, read(partial).getItems(0).getQuantity());
    assertEquals(0, read(partial).getItems(0).getPrice().getCents());
    partial.append("90\"");
    assertEquals(4990, read(partial).getItems(0).getPrice().getCents());
  }

  @Test
  void aMapThatHasAKeyTwiceKeepsItsLastValue() throws Exception {
    var json = "{\"labels\":{\"a\":\"1\",\"b\":\"2\",\"a\":\"3\"}}";
    var partial = new PartialJson(Invoice.getDescriptor());
    for (var character : json.split("")) {
      partial.append(character);
      read(partial);
    }
    assertEquals(Map.of("a", "3", "b", "2"), read(partial).getLabelsMap());
  }

  private static void assertBegins(Invoice partial) {
    assertTrue(WHOLE.getNumber().startsWith(partial.getNumber()), partial.toString());
    assertTrue(!partial.hasIssued() || partial.getIssued().equals(WHOLE.getIssued()), partial.toString());
    for (int i = 0; i < partial.getItemsCount(); i++) {
      var item = WHOLE.getItems(i);
      var begun = partial.getItems(i);
      assertTrue(item.getName().startsWith(begun.getName()));
      assertTrue(begun.getQuantity() == 0 || begun.getQuantity() == item.getQuantity());
      var cents = begun.getPrice().getCents();
      assertTrue(cents == 0 || cents == item.getPrice().getCents());
    }
    partial.getLabelsMap().forEach((key, value) -> assertTrue(WHOLE.getLabelsOrThrow(key).startsWith(value)));
  }

  private static Invoice read(PartialJson partial) throws Exception {
    return MessageType.of(Invoice.class).read(partial.closed());
  }

  private static String compact() throws Exception {
    return JsonFormat.printer().omittingInsignificantWhitespace().print(WHOLE);
  }

  private static Invoice.Item item(String name, int quantity, long cents) {
    return Invoice.Item.newBuilder()
        .setName(name)
        .setQuantity(quantity)
        .setPrice(Money.newBuilder().setCents(cents))
        .build();
  }
}
