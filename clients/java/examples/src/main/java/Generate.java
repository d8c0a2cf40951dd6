import io.photon.grpc.Client;
import io.photon.grpc.Request;

/** One whole generation: what came back, why it ended, what it cost, how likely the model held it. */
public class Generate {
  public static void main(String[] args) {
    try (var client = Client.connect(args.length > 0 ? args[0] : "127.0.0.1:50051")) {
      var request = Request.text("def fib(n):").maxTokens(48).temperature(0).logprobs(0);
      var result = client.generate(request);
      System.out.println(result.text());
      var logprob = result.outputs().get(0).scores().stream().mapToDouble(score -> score.logprob()).sum();
      System.out.printf(
          "-- %s: %d tokens of log probability %.1f, ended by %s%n",
          result.model(), result.usage().outputTokens(), logprob, result.finish().reason());
      System.out.printf("-- first token after %d ms%n", result.timing().firstToken().toMillis());
    }
  }
}
