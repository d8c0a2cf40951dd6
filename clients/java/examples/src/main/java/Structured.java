import com.acme.v1.Invoice;
import io.photon.grpc.Client;
import io.photon.grpc.PhotonException;
import io.photon.grpc.Request;

/** A message of one's own instead of text: as it is filled, then whole. */
public class Structured {
  public static void main(String[] args) {
    try (var client = Client.connect(args.length > 0 ? args[0] : "127.0.0.1:50051")) {
      // The embedded model knows Python, and no invoices.
      var request = Request.text("invoice_17 = ").maxTokens(400).seed(3);
      try (var stream = client.stream(request, Invoice.class)) {
        var last = "";
        for (Invoice invoice : stream) {
          var now = String.format("number '%s', %d items", invoice.getNumber(), invoice.getItemsCount());
          // Text that completes no value yet leaves the message as it was.
          if (!now.equals(last)) {
            System.out.println("so far: " + now);
          }
          last = now;
        }
        Invoice invoice = client.generate(request, Invoice.class);
        System.out.printf("invoice '%s', paid: %b%n", invoice.getNumber(), invoice.getIsPaid());
      } catch (PhotonException.MessageMismatch cut) {
        System.out.println("cut: " + cut.getMessage());
      }
      var choice = client.generate(Request.text("A prime number: ").choices("4", "7", "9"));
      System.out.println("one of three: " + choice.text());
    }
  }
}
