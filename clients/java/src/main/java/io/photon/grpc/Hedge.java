package io.photon.grpc;

import io.photon.grpc.v1.GenerateResponse;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/**
 * A call and, where it has not answered after a while, a second one, which gRPC sends to the next replica. The first
 * answer wins and the other call is cancelled. Where both fail it is with the first one's failure.
 */
final class Hedge extends CompletableFuture<GenerateResponse> {
  private final Supplier<CompletableFuture<GenerateResponse>> again;
  private final CompletableFuture<GenerateResponse> first;
  private CompletableFuture<GenerateResponse> second;
  private Throwable failure;

  Hedge(
      CompletableFuture<GenerateResponse> first,
      Supplier<CompletableFuture<GenerateResponse>> again,
      Duration wait) {
    this.first = first;
    this.again = again;
    first.whenComplete(this::told);
    CompletableFuture.delayedExecutor(wait.toNanos(), TimeUnit.NANOSECONDS).execute(this::askAgain);
    whenComplete((answer, error) -> cancelCalls());
  }

  private void askAgain() {
    CompletableFuture<GenerateResponse> asked;
    synchronized (this) {
      if (isDone()) {
        return;
      }
      asked = second = again.get();
    }
    asked.whenComplete(this::told);
  }

  private void told(GenerateResponse answer, Throwable error) {
    if (error == null) {
      complete(answer);
    } else if (isLastFailure(error)) {
      completeExceptionally(failure);
    }
  }

  private synchronized boolean isLastFailure(Throwable error) {
    failure = failure == null ? error : failure;
    return first.isDone() && (second == null || second.isDone());
  }

  private synchronized void cancelCalls() {
    first.cancel(true);
    if (second != null) {
      second.cancel(true);
    }
  }
}
