package io.photon.grpc;

import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.StreamGenerateResponse;
import java.util.UUID;
import java.util.concurrent.Executor;

/** One request of many on a stream. */
final class MultiplexedCall implements MessageCall {
  private final MultiplexStream stream;
  private final GenerateRequest request;
  private final Executor executor;
  private Listener listener;

  /** The request gets an id where it has none. */
  MultiplexedCall(MultiplexStream stream, GenerateRequest request, Executor executor) {
    this.stream = stream;
    this.executor = executor;
    this.request =
        request.getRequestId().isEmpty()
            ? request.toBuilder().setRequestId(UUID.randomUUID().toString()).build()
            : request;
  }

  String id() {
    return request.getRequestId();
  }

  GenerateRequest request() {
    return request;
  }

  void tell(StreamGenerateResponse message) {
    executor.execute(() -> listener.onMessage(message));
  }

  void end(PhotonException error) {
    executor.execute(() -> listener.onEnd(error));
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
  public void cancel() {
    stream.cancel(this);
  }
}
