package io.photon.grpc;

import java.lang.ref.Cleaner;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.concurrent.Executor;
import java.util.function.Function;

/**
 * The deltas of a generation as they are produced, for one thread; ends when every output has finished.
 *
 * <pre>{@code
 * try (var stream = client.stream(request)) {
 *   for (var delta : stream) {
 *     System.out.print(delta.text());
 *   }
 * }
 * }</pre>
 *
 * Leaving the block early frees what the request holds on the server at its next step; so does dropping the object,
 * when it is collected. Messages are asked for as they are read: a slow reader slows down no one else. Throws
 * PhotonException; what came before it stands.
 */
public final class GenerationStream implements Iterable<Delta>, Iterator<Delta>, AutoCloseable {
  private static final Cleaner CLEANER = Cleaner.create();

  private final Inbox inbox;
  private final Cleaner.Cleanable cancel;

  GenerationStream(boolean withTokenIds, Function<Executor, MessageCall> opener) {
    inbox = new Inbox(withTokenIds);
    inbox.begin(opener.apply(inbox));
    cancel = CLEANER.register(this, inbox::cancel);
  }

  /** Wait for the next delta: false when the generation is complete. */
  @Override
  public boolean hasNext() {
    return inbox.hasNext();
  }

  @Override
  public Delta next() {
    if (!inbox.hasNext()) {
      throw new NoSuchElementException();
    }
    return inbox.next();
  }

  /** This object: deltas come once. */
  @Override
  public Iterator<Delta> iterator() {
    return this;
  }

  /** Known with the first delta; null before. */
  public Start start() {
    return inbox.start;
  }

  /** Known when the stream has ended, and with every delta where the request has continuous_usage; null before. */
  public Usage usage() {
    return inbox.usage;
  }

  /** Known when the stream has ended; null before. A resumed stream tells the time of its last call. */
  public Timing timing() {
    return inbox.timing;
  }

  /**
   * Whether all that came is what the first server would have given: false once another one has gone on that may compute
   * other bits.
   */
  public boolean isBitExact() {
    return inbox.isBitExact;
  }

  /** End the request, from any thread; do nothing once it has ended. */
  public void cancel() {
    inbox.cancel();
  }

  @Override
  public void close() {
    cancel.clean();
  }
}
