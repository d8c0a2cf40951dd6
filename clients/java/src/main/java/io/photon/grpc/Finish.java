package io.photon.grpc;

/**
 * Why an output ended. {@code reason} is a FinishReason of the proto without its prefix: "EOS", "MAX_TOKENS", ...; what
 * was met is set for EOS, STOP_STRING and STOP_TOKEN, else null.
 */
public record Finish(String reason, String stopString, Integer stopTokenId, Integer eosTokenId) {
  private static final String PREFIX = "FINISH_REASON_";

  static Finish of(io.photon.grpc.v1.Finish message) {
    var known = message.getReason();
    // A reason of a newer server has no name here yet: its number stands for it.
    var reason =
        known == io.photon.grpc.v1.FinishReason.UNRECOGNIZED
            ? String.valueOf(message.getReasonValue())
            : known.name().substring(PREFIX.length());
    return new Finish(
        reason,
        message.hasStopString() ? message.getStopString() : null,
        message.hasStopTokenId() ? message.getStopTokenId() : null,
        message.hasEosTokenId() ? message.getEosTokenId() : null);
  }
}
