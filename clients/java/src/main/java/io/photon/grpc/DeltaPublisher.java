package io.photon.grpc;

import io.photon.grpc.v1.StreamGenerateResponse;
import java.util.ArrayDeque;
import java.util.Queue;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.function.Function;
import java.util.function.Supplier;

/** Deltas on demand; every subscription is a generation of its own. */
final class DeltaPublisher implements Flow.Publisher<Delta> {
  private final Supplier<Executor> serialExecutors;
  private final Function<Executor, MessageCall> opener;
  private final boolean withTokenIds;

  DeltaPublisher(
      Supplier<Executor> serialExecutors, Function<Executor, MessageCall> opener, boolean withTokenIds) {
    this.serialExecutors = serialExecutors;
    this.opener = opener;
    this.withTokenIds = withTokenIds;
  }

  @Override
  public void subscribe(Flow.Subscriber<? super Delta> subscriber) {
    var executor = serialExecutors.get();
    var subscription = new Subscription(subscriber, executor, opener.apply(executor), withTokenIds);
    executor.execute(subscription::begin);
  }

  /** Everything happens in the executor, one thing after another. */
  private static final class Subscription implements Flow.Subscription, MessageCall.Listener {
    private final Flow.Subscriber<? super Delta> subscriber;
    private final Executor executor;
    private final MessageCall call;
    private final boolean withTokenIds;
    private final Queue<Delta> ready = new ArrayDeque<>();
    private long demand;
    private boolean isAsked;
    private boolean isOver;
    private boolean isTold;
    private PhotonException error;

    Subscription(
        Flow.Subscriber<? super Delta> subscriber, Executor executor, MessageCall call, boolean withTokenIds) {
      this.subscriber = subscriber;
      this.executor = executor;
      this.call = call;
      this.withTokenIds = withTokenIds;
    }

    void begin() {
      var closed = start();
      subscriber.onSubscribe(this);
      if (closed != null) {
        end(closed);
      }
    }

    /** The error of a client that was closed; null: the call runs. */
    private PhotonException start() {
      try {
        call.start(this);
        return null;
      } catch (PhotonException closed) {
        isOver = true;
        return closed;
      }
    }

    @Override
    public void request(long deltas) {
      executor.execute(() -> want(deltas));
    }

    @Override
    public void cancel() {
      executor.execute(
          () -> {
            isTold = true;
            if (!isOver) {
              call.cancel();
            }
          });
    }

    @Override
    public void onMessage(StreamGenerateResponse message) {
      isAsked = false;
      message.getDeltasList().forEach(delta -> ready.add(Delta.of(delta, withTokenIds)));
      tell();
    }

    @Override
    public void onEnd(PhotonException error) {
      this.error = error;
      isOver = true;
      tell();
    }

    private void want(long deltas) {
      if (isTold) {
        return;
      }
      if (deltas <= 0) {
        call.cancel();
        end(new IllegalArgumentException("request(" + deltas + "): at least 1 is asked for"));
        return;
      }
      demand = demand + deltas < 0 ? Long.MAX_VALUE : demand + deltas;
      tell();
    }

    private void tell() {
      while (demand > 0 && !ready.isEmpty() && !isTold) {
        demand--;
        subscriber.onNext(ready.remove());
      }
      if (ready.isEmpty() && isOver) {
        end(error);
      } else if (ready.isEmpty() && demand > 0 && !isAsked) {
        isAsked = true;
        call.request(1);
      }
    }

    private void end(Throwable failure) {
      if (isTold) {
        return;
      }
      isTold = true;
      if (failure == null) {
        subscriber.onComplete();
      } else {
        subscriber.onError(failure);
      }
    }
  }
}
