package io.photon.grpc;

import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import java.util.Iterator;
import java.util.NoSuchElementException;

/**
 * A message as it is filled, for one thread: each one has more than the one before, the last is whole. A field comes
 * when its value is complete, a string as it is written, a long one by shares. Leaving early and failures are those of {@link
 * GenerationStream}; one that ends before the message is whole throws MessageMismatch.
 */
public final class MessageStream<T extends Message> implements Iterable<T>, Iterator<T>, AutoCloseable {
  private final GenerationStream deltas;
  private final MessageType<T> type;
  private final PartialJson json;
  private T last;
  private T next;
  private long length;
  private long parsedLength;
  private int parsedEnd;

  MessageStream(GenerationStream deltas, MessageType<T> type) {
    this.deltas = deltas;
    this.type = type;
    this.json = new PartialJson(type.empty().getDescriptorForType());
    this.last = type.empty();
  }

  /** Wait until there is more: false when the message is whole. */
  @Override
  public boolean hasNext() {
    while (next == null && deltas.hasNext()) {
      var delta = deltas.next();
      json.append(delta.text());
      length += delta.text().length();
      if (delta.finish() == null && !isWorthParsing()) {
        continue;
      }
      var filled = delta.finish() == null ? partial() : whole(delta);
      if (delta.finish() != null || !filled.equals(last)) {
        next = filled;
      }
    }
    return next != null;
  }

  @Override
  public T next() {
    if (!hasNext()) {
      throw new NoSuchElementException();
    }
    last = next;
    next = null;
    return last;
  }

  /** This object: messages come once. */
  @Override
  public Iterator<T> iterator() {
    return this;
  }

  /** Start, usage and timing, and the text itself, where that is what is wanted. */
  public GenerationStream deltas() {
    return deltas;
  }

  @Override
  public void close() {
    deltas.close();
  }

  /**
   * Whether a value is complete that was not, or the text has grown by a sixteenth since it was parsed: all of it is
   * parsed, and of a long string in small pieces each time would take time by the square of its length.
   */
  private boolean isWorthParsing() {
    return json.end() > parsedEnd || length - parsedLength > parsedLength / 16;
  }

  private T partial() {
    parsedEnd = json.end();
    parsedLength = length;
    try {
      return type.read(json.closed());
    } catch (InvalidProtocolBufferException notYet) {
      return last;
    }
  }

  private T whole(Delta delta) {
    if (delta.message() == null) {
      throw PhotonException.cut(type.name(), delta.finish());
    }
    return type.unpack(delta.message());
  }
}
