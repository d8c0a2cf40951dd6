import io.photon.grpc.Client;
import io.photon.grpc.PhotonException;
import io.photon.grpc.Request;
import java.time.Duration;

/** Three ways to end a request early; each frees what it holds on the server at its next step. */
public class Cancel {
  public static void main(String[] args) {
    try (var client = Client.connect(args.length > 0 ? args[0] : "127.0.0.1:50051")) {
      var endless = Request.text("def fib(n):").maxTokens(3000).ignoreEos(true);
      try (var stream = client.stream(endless)) {
        for (var delta : stream) {
          System.out.println("left the block after " + delta.text().length() + " characters");
          break;
        }
      }
      var future = client.generateAsync(endless);
      System.out.println("cancelled the future: " + future.cancel(true));
      try {
        client.generate(endless.timeout(Duration.ofMillis(200)));
      } catch (PhotonException.DeadlinePassed passed) {
        System.out.println("the deadline ended it: " + passed.reason());
      }
    }
  }
}
