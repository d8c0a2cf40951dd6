import io.photon.grpc.Client;
import io.photon.grpc.Request;

/** A conversation: messages in, the answer appended, the next question after it. */
public class Chat {
  public static void main(String[] args) {
    var chat = new io.photon.grpc.Chat().system("You complete Python code.");
    try (var client = Client.connect(args.length > 0 ? args[0] : "127.0.0.1:50051")) {
      for (var question : new String[] {"def add(a, b):", "def is_even(n):"}) {
        System.out.print("user: " + question + "\nassistant: ");
        var answer = new StringBuilder();
        try (var stream = client.stream(Request.chat(chat.user(question)).maxTokens(24).temperature(0))) {
          for (var delta : stream) {
            System.out.print(delta.text());
            answer.append(delta.text());
          }
        }
        chat.assistant(answer.toString());
        System.out.println();
      }
    }
  }
}
