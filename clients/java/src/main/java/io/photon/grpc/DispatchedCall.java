package io.photon.grpc;

import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Status;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.StreamGenerateResponse;
import java.time.Duration;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/**
 * A call in the form that its server takes, without heartbeats. gRPC tries a call again until headers of an answer
 * came, this one until the first message that is no heartbeat.
 */
final class DispatchedCall implements MessageCall, MessageCall.Listener {
  private final Dispatch dispatch;
  private final Deadline deadline;
  private final Executor executor;
  private final Function<GenerateRequest, MessageCall> opener;
  private final Context context = Context.current();
  private Listener listener;

  private final Set<Status.Code> retried;

  // In the executor.
  private int retriesLeft;
  private int attempts = 1;
  private boolean wasCut;
  private boolean hasMessages;
  private PhotonException refusal;

  // Under the lock: what other threads ask for.
  private MessageCall call;
  private int demand;
  private boolean isCancelled;

  /** What may be tried again here, and how often: not what {@code opener}'s calls, or a caller that resumes, do. */
  record Retries(int most, Set<Status.Code> codes) {
    static final Retries NONE = new Retries(0, Set.of());
  }

  DispatchedCall(
      Dispatch dispatch,
      Deadline deadline,
      Retries retries,
      Executor executor,
      Function<GenerateRequest, MessageCall> opener) {
    this.dispatch = dispatch;
    this.deadline = deadline;
    this.retriesLeft = retries.most();
    this.retried = retries.codes();
    this.executor = executor;
    this.opener = opener;
  }

  /** Throw Closed where the client was closed. */
  @Override
  public void start(Listener listener) {
    this.listener = listener;
    send();
  }

  @Override
  public synchronized void request(int messages) {
    demand += messages;
    if (call != null) {
      call.request(messages);
    }
  }

  @Override
  public synchronized boolean hasBegun() {
    return call != null && call.hasBegun();
  }

  @Override
  public synchronized void cancel() {
    isCancelled = true;
    if (call != null) {
      call.cancel();
    }
  }

  @Override
  public void onMessage(StreamGenerateResponse message) {
    if (Joins.isHeartbeat(message)) {
      again();
      return;
    }
    synchronized (this) {
      demand--;
    }
    if (refusal == null && (hasMessages || arrived(message))) {
      listener.onMessage(message);
    }
  }

  private boolean arrived(StreamGenerateResponse message) {
    hasMessages = true;
    try {
      dispatch.arrived(message.getStart().getRelease());
      return true;
    } catch (PhotonException ignored) {
      refusal = ignored;
      cancel();
      return false;
    }
  }

  @Override
  public void onEnd(PhotonException error) {
    if (refusal != null) {
      listener.onEnd(refusal);
    } else if (error == null || hasMessages) {
      listener.onEnd(error);
    } else if (dispatch.again(error)) {
      sendAgain();
    } else if (mayRetry(error)) {
      retriesLeft--;
      wasCut |= error.code() != Status.Code.RESOURCE_EXHAUSTED;
      var wait = wait(error);
      attempts++;
      CompletableFuture.delayedExecutor(wait.toNanos(), TimeUnit.NANOSECONDS, executor).execute(this::sendAgain);
    } else {
      listener.onEnd(error);
    }
  }

  private void send() {
    var message = dispatch.message();
    if (message != null) {
      open(message);
    } else {
      dispatch
          .admitted(deadline)
          .whenComplete((admitted, failure) -> executor.execute(() -> take(admitted, failure)));
    }
  }

  private void sendAgain() {
    try {
      send();
    } catch (PhotonException closed) {
      listener.onEnd(closed);
    }
  }

  private void take(GenerateRequest admitted, Throwable failure) {
    if (failure != null) {
      listener.onEnd(Statuses.error(failure));
      return;
    }
    try {
      open(admitted);
    } catch (PhotonException closed) {
      listener.onEnd(closed);
    }
  }

  /** Throw Closed where the client was closed. */
  private void open(GenerateRequest message) {
    synchronized (this) {
      if (!isCancelled) {
        context.run(() -> call = opener.apply(message));
        call.start(this);
        if (demand > 0) {
          call.request(demand);
        }
        return;
      }
    }
    listener.onEnd(new PhotonException.Cancelled("ended by its caller"));
  }

  private synchronized void again() {
    call.request(1);
  }

  private boolean mayRetry(PhotonException error) {
    if (retriesLeft == 0 || !hasBegun() || isOver(error)) {
      return false;
    }
    // The server may not have seen yet that the connection of the attempt before is gone.
    var isOwnId = wasCut && error.code() == Status.Code.ALREADY_EXISTS;
    return (isOwnId || retried.contains(error.code()))
        && wait(error).compareTo(left()) < 0;
  }

  private synchronized boolean isOver(PhotonException error) {
    return isCancelled
        || error.isFinal()
        || error instanceof PhotonException.Closed
        || error instanceof PhotonException.Cancelled;
  }

  private Duration wait(PhotonException error) {
    return error.retryAfter() != null ? error.retryAfter() : RetryPolicy.ours().pause(attempts);
  }

  private Duration left() {
    return Duration.ofNanos(deadline.timeRemaining(TimeUnit.NANOSECONDS));
  }
}
