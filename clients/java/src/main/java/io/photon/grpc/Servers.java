package io.photon.grpc;

import io.grpc.Deadline;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.Supplier;

/** What a channel has learned of its servers. */
final class Servers {
  /** A server that is older than a field may be replaced by one that is not. */
  private static final Duration OLD_FOR = Duration.ofMinutes(1);

  final SentSets sets = new SentSets();
  private final Supplier<CompletableFuture<Boolean>> question;
  private CompletableFuture<Boolean> answer;
  private long answeredNanos;

  /** {@code question} asks a server whether it refuses fields that it does not know. */
  Servers(Supplier<CompletableFuture<Boolean>> question) {
    this.question = question;
  }

  /** Whether they refuse fields that they do not know. They are asked once, when it first matters. */
  CompletableFuture<Boolean> refuseUnknownFields(Deadline deadline) {
    return answer()
        .copy()
        .orTimeout(Math.max(deadline.timeRemaining(TimeUnit.NANOSECONDS), 1), TimeUnit.NANOSECONDS)
        .handle(
            (refuse, failure) -> {
              if (failure != null) {
                throw error(failure);
              }
              return refuse;
            });
  }

  /** The connection has changed, and perhaps the server. */
  synchronized void forget() {
    answer = null;
  }

  private synchronized CompletableFuture<Boolean> answer() {
    if (answer == null || answer.isCompletedExceptionally() || isOld()) {
      answer = question.get();
      answeredNanos = System.nanoTime();
    }
    return answer;
  }

  private boolean isOld() {
    return answer.isDone() && !answer.join() && System.nanoTime() - answeredNanos > OLD_FOR.toNanos();
  }

  private static PhotonException error(Throwable failure) {
    return isTimeout(failure) ? PhotonException.deadlinePassed() : Statuses.error(failure);
  }

  private static boolean isTimeout(Throwable failure) {
    return failure instanceof TimeoutException
        || failure instanceof CompletionException && failure.getCause() instanceof TimeoutException;
  }
}
