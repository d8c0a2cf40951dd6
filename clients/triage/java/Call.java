import com.acme.v1.Step;
import com.acme.v1.Ticket;
import com.acme.v1.TriageServiceGrpc;
import com.acme.v1.Verdict;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import java.util.Iterator;
import java.util.concurrent.TimeUnit;

/** A caller with the stubs that protoc made of triage.proto, and nothing of photon_grpc: {@code mvn compile exec:java}. */
public final class Call {
  private Call() {}

  public static void main(String[] args) {
    String target = args.length > 0 ? args[0] : "127.0.0.1:50051";
    ManagedChannel channel = Grpc.newChannelBuilder(target, InsecureChannelCredentials.create()).build();
    try {
      TriageServiceGrpc.TriageServiceBlockingStub service =
          TriageServiceGrpc.newBlockingStub(channel).withDeadlineAfter(60, TimeUnit.SECONDS);
      Ticket ticket =
          Ticket.newBuilder().setSubject("It leaks").setBody("There is water under the machine.").build();
      Verdict verdict = service.triage(ticket);
      System.out.printf("%s, severity %d: %s%n", verdict.getTeam(), verdict.getSeverity(), verdict.getSummary());
      for (Iterator<Step> steps = service.plan(ticket); steps.hasNext(); ) {
        Step step = steps.next();
        System.out.printf("- %s (%d minutes)%n", step.getAction(), step.getMinutes());
      }
    } finally {
      channel.shutdownNow();
    }
  }
}
