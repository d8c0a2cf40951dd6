package io.photon.grpc;

import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.GenerateResponse;
import io.photon.grpc.v1.MultiplexGenerateRequest;
import io.photon.grpc.v1.MultiplexGenerateResponse;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.function.Supplier;

/**
 * The calls of a {@link Client}, thousands at a time, over one stream of one connection; for any number of threads. One
 * that fails harms no other. When the stream is lost, or its server drains, the next request opens another, and what
 * was cut goes on there. A server that needs the stream's place ends it while it is idle: the next request opens
 * another. Closing ends what still runs.
 */
public final class Multiplex extends Generator implements AutoCloseable {
  /** No message but the first and the last. */
  private static final int AT_THE_END = -1;

  private final Servers servers;
  private final int retries;
  private final Supplier<ClientCall<MultiplexGenerateRequest, MultiplexGenerateResponse>> calls;
  private final Runnable reconnect;
  /** New requests go to the last; the others are read to the end of what they have. */
  private final List<MultiplexStream> streams = new ArrayList<>();

  private boolean isClosed;

  Multiplex(
      Duration defaultTimeout,
      boolean resumes,
      int retries,
      Servers servers,
      Supplier<ClientCall<MultiplexGenerateRequest, MultiplexGenerateResponse>> calls,
      Runnable reconnect) {
    super(defaultTimeout, resumes);
    this.retries = retries;
    this.servers = servers;
    this.calls = calls;
    this.reconnect = reconnect;
  }

  @Override
  public void close() {
    List<MultiplexStream> open;
    synchronized (this) {
      isClosed = true;
      open = List.copyOf(streams);
    }
    open.forEach(MultiplexStream::close);
  }

  @Override
  MessageCall open(GenerateRequest request, CallOptions options) {
    return new MultiplexedCall(this::stream, request, options.getDeadline(), retries, options.getExecutor());
  }

  @Override
  void reconnect() {
    reconnect.run();
  }

  @Override
  Servers servers() {
    return servers;
  }

  /** Its calls try again themselves. */
  @Override
  DispatchedCall.Retries retries(boolean isResumed) {
    return DispatchedCall.Retries.NONE;
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
    streams.removeIf(MultiplexStream::isOver);
    if (streams.isEmpty() || streams.get(streams.size() - 1).isLeaving()) {
      streams.add(new MultiplexStream(calls.get()));
    }
    return streams.get(streams.size() - 1);
  }
}
