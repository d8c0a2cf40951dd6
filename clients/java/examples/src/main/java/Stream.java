import io.photon.grpc.Client;
import io.photon.grpc.Request;

/** Text as it is produced. A server that dies on the way is not noticed where there is another one. */
public class Stream {
  public static void main(String[] args) {
    try (var client = Client.connect(args.length > 0 ? args[0] : "127.0.0.1:50051")) {
      var request = Request.text("class Stack:").maxTokens(64).temperature(0.7).seed(1).stopStrings("\nclass ");
      try (var stream = client.stream(request)) {
        for (var delta : stream) {
          System.out.print(delta.text());
          if (delta.finish() != null) {
            System.out.printf("%n-- %s, %s%n", delta.finish().reason(), stream.usage());
          }
        }
      }
    }
  }
}
