package io.photon.grpc;

import io.photon.grpc.v1.StreamGenerateResponse;
import java.util.ArrayDeque;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Executor;
import java.util.concurrent.LinkedBlockingQueue;

/** The receiving end of a blocking stream: gRPC's callbacks run in the thread that waits for a delta. */
final class Inbox implements Executor, MessageCall.Listener {
  /** Messages that may be under way to a reader that is busy. */
  private static final int PREFETCH = 4;

  private final BlockingQueue<Runnable> due = new LinkedBlockingQueue<>();
  private final ArrayDeque<Delta> ready = new ArrayDeque<>();
  private final boolean withTokenIds;
  private MessageCall call;
  private PhotonException error;
  private boolean isOver;
  boolean isBitExact = true;
  Start start;
  Usage usage;
  Timing timing;

  Inbox(boolean withTokenIds) {
    this.withTokenIds = withTokenIds;
  }

  void begin(MessageCall call) {
    this.call = call;
    call.start(this);
    call.request(PREFETCH);
  }

  /** Wait until there is a delta: false where the stream has ended. Throw PhotonException where it has failed. */
  boolean hasNext() {
    while (ready.isEmpty() && !isOver) {
      take().run();
    }
    if (ready.isEmpty() && error != null) {
      throw error;
    }
    return !ready.isEmpty();
  }

  Delta next() {
    return ready.remove();
  }

  void cancel() {
    call.cancel();
  }

  @Override
  public void execute(Runnable callback) {
    due.add(callback);
  }

  @Override
  public void onMessage(StreamGenerateResponse message) {
    if (message.hasStart() && start != null) {
      isBitExact = false;
    } else if (message.hasStart()) {
      start = Start.of(message.getStart());
    }
    if (message.hasUsage()) {
      usage = Usage.of(message.getUsage());
    }
    if (message.hasTiming()) {
      timing = Timing.of(message.getTiming());
    }
    for (int i = 0; i < message.getDeltasCount(); i++) {
      ready.add(Delta.of(message.getDeltas(i), withTokenIds));
    }
    call.request(1);
  }

  @Override
  public void onEnd(PhotonException error) {
    this.error = error;
    isOver = true;
  }

  private Runnable take() {
    try {
      return due.take();
    } catch (InterruptedException interrupted) {
      cancel();
      Thread.currentThread().interrupt();
      throw new PhotonException.Cancelled("the thread that waited was interrupted");
    }
  }
}
