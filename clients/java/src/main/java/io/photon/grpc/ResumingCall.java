package io.photon.grpc;

import io.grpc.Context;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.StreamGenerateResponse;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/**
 * A stream that goes on where it was cut: with the same seed, from the tokens that were delivered, on the replica that
 * gRPC picks next. What fails before anything was received is left to gRPC's own retries, and to MultiplexedCall's.
 */
final class ResumingCall implements MessageCall, MessageCall.Listener {
  /** How long to look for a replica that goes on. */
  private static final Duration PATIENCE = Duration.ofSeconds(60);

  private static final Duration FIRST_WAIT = Duration.ofMillis(50);
  private static final Duration LONGEST_WAIT = Duration.ofSeconds(2);

  private final Function<GenerateRequest, MessageCall> opener;
  private final Runnable reconnect;
  private final Executor executor;
  private final Context context = Context.current();
  private final Progress progress;
  private Listener listener;
  private Duration wait = Duration.ZERO;
  private long cutNanos;
  private boolean isSearching;

  // Under the lock: what other threads ask for.
  private MessageCall call;
  private int demand;
  private boolean isCancelled;

  ResumingCall(
      GenerateRequest request,
      Executor executor,
      Function<GenerateRequest, MessageCall> opener,
      Runnable reconnect) {
    this.reconnect = reconnect;
    this.progress = new Progress(request);
    this.executor = executor;
    this.opener = opener;
  }

  @Override
  public void start(Listener listener) {
    this.listener = listener;
    open();
  }

  @Override
  public synchronized void request(int messages) {
    demand += messages;
    call.request(messages);
  }

  @Override
  public synchronized void cancel() {
    isCancelled = true;
    call.cancel();
  }

  @Override
  public synchronized boolean hasBegun() {
    return call.hasBegun();
  }

  @Override
  public void onMessage(StreamGenerateResponse message) {
    synchronized (this) {
      demand--;
    }
    isSearching = false;
    listener.onMessage(progress.take(message));
  }

  @Override
  public void onEnd(PhotonException error) {
    if (error == null || progress.isComplete()) {
      listener.onEnd(null);
    } else if (!isCut(error)) {
      listener.onEnd(error);
    } else if (progress.hasManyOutputs() && progress.hasStarted()) {
      listener.onEnd(error.saying("; a stream with num_outputs above 1 cannot be resumed"));
    } else {
      search(error);
    }
  }

  /** Whether another replica, or the same one later, can go on. */
  private boolean isCut(PhotonException error) {
    synchronized (this) {
      if (isCancelled || error instanceof PhotonException.Closed) {
        return false;
      }
    }
    return switch (error.code()) {
      case UNAVAILABLE, CANCELLED -> isSearching || progress.hasStarted() || hasBegun();
      // The other replica is full; or this one has not seen yet that the connection of the first call is gone.
      case RESOURCE_EXHAUSTED, ALREADY_EXISTS -> isSearching;
      default -> false;
    };
  }

  private void search(PhotonException error) {
    var now = System.nanoTime();
    if (!isSearching) {
      isSearching = true;
      cutNanos = now;
      wait = Duration.ZERO;
    }
    if (now - cutNanos > PATIENCE.toNanos()) {
      listener.onEnd(error);
      return;
    }
    reconnect.run();
    var delay = longer(wait, error.retryAfter());
    wait = wait.isZero() ? FIRST_WAIT : shorter(wait.multipliedBy(2), LONGEST_WAIT);
    CompletableFuture.delayedExecutor(delay.toMillis(), TimeUnit.MILLISECONDS, executor)
        .execute(context.wrap(this::reopen));
  }

  private void reopen() {
    try {
      open();
    } catch (PhotonException closed) {
      listener.onEnd(closed);
    }
  }

  /** Throw Closed where the client was closed. */
  private void open() {
    synchronized (this) {
      if (!isCancelled) {
        call = opener.apply(progress.rest());
        call.start(this);
        if (demand > 0) {
          call.request(demand);
        }
        return;
      }
    }
    listener.onEnd(new PhotonException.Cancelled("ended by its caller"));
  }

  private static Duration longer(Duration wait, Duration told) {
    return told == null || wait.compareTo(told) > 0 ? wait : shorter(told, PATIENCE);
  }

  private static Duration shorter(Duration one, Duration other) {
    return one.compareTo(other) < 0 ? one : other;
  }
}
