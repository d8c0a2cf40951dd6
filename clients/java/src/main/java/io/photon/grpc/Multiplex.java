package io.photon.grpc;

import io.grpc.ClientCall;
import io.grpc.Deadline;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.GenerateResponse;
import io.photon.grpc.v1.MultiplexGenerateRequest;
import io.photon.grpc.v1.MultiplexGenerateResponse;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.function.Supplier;

/**
 * The calls of a {@link Client}, thousands at a time, over one stream of one connection; for any number of threads. One
 * that fails harms no other. A stream that is lost, or drained, is opened again, and what was cut goes on there.
 * Closing ends what still runs.
 */
public final class Multiplex extends Generator implements AutoCloseable {
  /** No message but the first and the last. */
  private static final int AT_THE_END = -1;

  private final int retries;
  private final Supplier<ClientCall<MultiplexGenerateRequest, MultiplexGenerateResponse>> calls;
  private final Runnable reconnect;
  private MultiplexStream stream;
  private boolean isClosed;

  Multiplex(
      Duration defaultTimeout,
      boolean resumes,
      int retries,
      Supplier<ClientCall<MultiplexGenerateRequest, MultiplexGenerateResponse>> calls,
      Runnable reconnect) {
    super(defaultTimeout, resumes);
    this.retries = retries;
    this.calls = calls;
    this.reconnect = reconnect;
  }

  @Override
  public void close() {
    MultiplexStream last;
    synchronized (this) {
      isClosed = true;
      last = stream;
    }
    if (last != null) {
      last.close();
    }
  }

  @Override
  MessageCall open(GenerateRequest request, Deadline deadline, Executor executor) {
    return new MultiplexedCall(this::stream, request, deadline, retries, executor);
  }

  @Override
  void reconnect() {
    reconnect.run();
  }

  @Override
  GenerateResponse whole(Request request) {
    return await(wholeAsync(request));
  }

  @Override
  CompletableFuture<GenerateResponse> wholeAsync(Request request) {
    var message = request.toProto().toBuilder();
    message.getStreamBuilder().setMaxTokensPerMessage(AT_THE_END);
    var executor = serialExecutor();
    return new Gatherer(openStream(message.build(), deadline(request), executor)).begin();
  }

  private synchronized MultiplexStream stream() {
    if (isClosed) {
      throw new PhotonException.Closed("the stream was closed");
    }
    if (stream == null || stream.isOver()) {
      stream = new MultiplexStream(calls.get());
    }
    return stream;
  }
}
