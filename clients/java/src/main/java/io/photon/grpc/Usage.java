package io.photon.grpc;

/** The tokens that are billed. */
public record Usage(int promptTokens, int cachedPromptTokens, int outputTokens) {
  static Usage of(io.photon.grpc.v1.Usage message) {
    return new Usage(message.getPromptTokens(), message.getCachedPromptTokens(), message.getOutputTokens());
  }
}
