package io.photon.grpc;

import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.Status;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.StreamGenerateResponse;
import java.util.function.BooleanSupplier;

/** One StreamGenerate call, whose messages come as fast as they are asked for. */
final class StreamCall implements MessageCall {
  private final ClientCall<GenerateRequest, StreamGenerateResponse> call;
  private final GenerateRequest request;
  private final BooleanSupplier isClosed;
  private volatile boolean hasBegun;
  private volatile boolean isCancelled;

  StreamCall(
      ClientCall<GenerateRequest, StreamGenerateResponse> call, GenerateRequest request, BooleanSupplier isClosed) {
    this.call = call;
    this.request = request;
    this.isClosed = isClosed;
  }

  @Override
  public void start(Listener listener) {
    call.start(new Adapter(listener), new Metadata());
    call.sendMessage(request);
    call.halfClose();
  }

  @Override
  public void request(int messages) {
    call.request(messages);
  }

  @Override
  public boolean hasBegun() {
    return hasBegun;
  }

  @Override
  public void cancel() {
    isCancelled = true;
    call.cancel("ended by its caller", null);
  }

  private final class Adapter extends ClientCall.Listener<StreamGenerateResponse> {
    private final Listener listener;

    Adapter(Listener listener) {
      this.listener = listener;
    }

    @Override
    public void onHeaders(Metadata headers) {
      hasBegun = true;
    }

    @Override
    public void onMessage(StreamGenerateResponse message) {
      listener.onMessage(message);
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      if (status.isOk()) {
        listener.onEnd(null);
      } else if (isCancelled) {
        listener.onEnd(new PhotonException.Cancelled("ended by its caller"));
      } else if (isClosed.getAsBoolean()) {
        listener.onEnd(new PhotonException.Closed("the client was closed"));
      } else {
        listener.onEnd(Statuses.error(status, trailers));
      }
    }
  }
}
