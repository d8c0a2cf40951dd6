package io.photon.grpc;

import io.photon.grpc.v1.StreamGenerateResponse;

/**
 * The messages of one generation: of a StreamGenerate call, of one request of a multiplexed stream, or of several such
 * calls, each of which goes on where the last was cut.
 */
interface MessageCall {
  /** Told one thing after another, in the executor that the call was opened with. */
  interface Listener {
    void onMessage(StreamGenerateResponse message);

    /** The last thing told; {@code error} is null where the generation is complete. */
    void onEnd(PhotonException error);
  }

  void start(Listener listener);

  /** Let so many more messages come. */
  void request(int messages);

  /** Whether the server has answered at all; what fails before, gRPC itself has tried again. */
  boolean hasBegun();

  /** End the request on the server; do nothing once it has ended. */
  void cancel();
}
