package io.photon.grpc;

/** The tokens that are billed. Draft tokens are those that speculation proposed; accepted ones are among the output. */
public record Usage(
    int promptTokens, int cachedPromptTokens, int outputTokens, int draftTokens, int acceptedDraftTokens) {
  static Usage of(io.photon.grpc.v1.Usage message) {
    return new Usage(
        message.getPromptTokens(),
        message.getCachedPromptTokens(),
        message.getOutputTokens(),
        message.getDraftTokens(),
        message.getAcceptedDraftTokens());
  }
}
