package io.photon.grpc;

import io.grpc.Deadline;
import io.grpc.Status;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.StreamGenerateResponse;
import java.time.Duration;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/**
 * One request of many on a stream. As gRPC does with calls, it is sent again where the server had no room for it, when
 * the server says that it may have.
 */
final class MultiplexedCall implements MessageCall {
  /** Streams that a request may be sent on again: a server that takes the place of each new one away is full. */
  private static final int MAX_REOPENED = 8;

  private final Supplier<MultiplexStream> streams;
  private final GenerateRequest request;
  private final Deadline deadline;
  private final Executor executor;
  private Listener listener;

  // In the executor.
  private int retriesLeft;
  private int reopeningsLeft = MAX_REOPENED;
  private boolean hasMessages;

  // Under the lock: what other threads ask for.
  private MultiplexStream stream;
  private boolean isCancelled;

  /** The request gets an id where it has none. Throw Closed where the streams were closed. */
  MultiplexedCall(
      Supplier<MultiplexStream> streams, GenerateRequest request, Deadline deadline, int retries, Executor executor) {
    this.streams = streams;
    this.deadline = deadline;
    this.retriesLeft = retries;
    this.executor = executor;
    this.request =
        request.getRequestId().isEmpty()
            ? request.toBuilder().setRequestId(UUID.randomUUID().toString()).build()
            : request;
    stream = streams.get();
  }

  String id() {
    return request.getRequestId();
  }

  /** The request with the time that is left for it. */
  GenerateRequest request() {
    var timed = request.toBuilder();
    timed.getSchedulingBuilder().setTimeout(Durations.write(left()));
    return timed.build();
  }

  void tell(StreamGenerateResponse message) {
    executor.execute(
        () -> {
          hasMessages |= !Joins.isHeartbeat(message);
          listener.onMessage(message);
        });
  }

  void end(PhotonException error) {
    executor.execute(
        () -> {
          if (error instanceof PhotonException.IdleStreamEvicted && !hasMessages && reopeningsLeft > 0) {
            // The stream was idle for its server: the request was still on its way.
            reopeningsLeft--;
            askAgain();
          } else if (error != null && mayRetry(error)) {
            retriesLeft--;
            CompletableFuture.delayedExecutor(error.retryAfter().toMillis(), TimeUnit.MILLISECONDS, executor)
                .execute(this::askAgain);
          } else {
            listener.onEnd(error);
          }
        });
  }

  @Override
  public void start(Listener listener) {
    this.listener = listener;
    stream.ask(this);
  }

  /** Nothing: a reader that is slow must not stop the others, so that its messages wait here. */
  @Override
  public void request(int messages) {}

  /** The stream was there before the request: gRPC does not try again what fails in it. */
  @Override
  public boolean hasBegun() {
    return true;
  }

  @Override
  public synchronized void cancel() {
    isCancelled = true;
    stream.cancel(this);
  }

  /** A refusal that does not say when to come back is final; one that outlasts the deadline might as well be. */
  private boolean mayRetry(PhotonException error) {
    return error.code() == Status.Code.RESOURCE_EXHAUSTED
        && error.retryAfter() != null
        && error.retryAfter().compareTo(left()) < 0
        && !hasMessages
        && retriesLeft > 0;
  }

  private void askAgain() {
    try {
      synchronized (this) {
        if (!isCancelled) {
          stream = streams.get();
          stream.ask(this);
          return;
        }
      }
      listener.onEnd(new PhotonException.Cancelled("ended by its caller"));
    } catch (PhotonException closed) {
      listener.onEnd(closed);
    }
  }

  private Duration left() {
    return Duration.ofNanos(Math.max(deadline.timeRemaining(TimeUnit.NANOSECONDS), 1));
  }
}
