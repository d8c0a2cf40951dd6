package io.photon.grpc;

/** The tokens of one output. */
public record OutputUsage(int outputTokens, int draftTokens, int acceptedDraftTokens) {
  static OutputUsage of(io.photon.grpc.v1.OutputUsage message) {
    return new OutputUsage(message.getOutputTokens(), message.getDraftTokens(), message.getAcceptedDraftTokens());
  }
}
