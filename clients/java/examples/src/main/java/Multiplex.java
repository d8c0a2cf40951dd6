import io.photon.grpc.Client;
import io.photon.grpc.PhotonException;
import io.photon.grpc.Request;
import java.util.List;
import java.util.concurrent.CompletionException;
import java.util.stream.Collectors;

/** Many requests over one stream of one connection. One that is refused does not disturb the others. */
public class Multiplex {
  public static void main(String[] args) {
    try (var client = Client.connect(args.length > 0 ? args[0] : "127.0.0.1:50051");
        var many = client.multiplex()) {
      var answers =
          List.of("import os\n", "def main():", "class Node:", "for i in range(", "").stream()
              .collect(
                  Collectors.toMap(
                      prompt -> prompt,
                      prompt -> many.generateAsync(Request.text(prompt).maxTokens(16).temperature(0))));
      for (var answer : answers.entrySet()) {
        try {
          System.out.printf("'%s' -> '%s'%n", answer.getKey().strip(), answer.getValue().join().text().strip());
        } catch (CompletionException failed) {
          var error = (PhotonException) failed.getCause();
          System.out.printf("'%s': refused, %s (%s)%n", answer.getKey(), error.reason(), error.field());
        }
      }
    }
  }
}
