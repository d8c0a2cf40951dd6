package io.photon.grpc;

import com.google.protobuf.ByteString;

/** A token that could have stood there: its natural-log probability, its rank (1: the most likely), its bytes. */
public record Candidate(int tokenId, float logprob, int rank, ByteString tokenBytes) {
  static Candidate of(io.photon.grpc.v1.Candidate message) {
    return new Candidate(
        message.getTokenId(), message.getLogprob(), message.getRank(), message.getTokenBytes());
  }
}
