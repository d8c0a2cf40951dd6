package io.photon.grpc;

import java.time.Instant;
import java.util.List;

/**
 * Known when a request is admitted; told with the first token. {@code seed} is the one in use, also when the server
 * drew it; {@code release} is the server's version, and {@code numericsVersion} that of its numerics, "" where it is older
 * than these fields; the prompt's ids and scores are there where the request asks for them.
 */
public record Start(
    String requestId,
    String model,
    long seed,
    Instant createTime,
    String release,
    String numericsVersion,
    List<Integer> promptTokenIds,
    List<TokenScore> promptScores) {
  static Start of(io.photon.grpc.v1.GenerationStart message) {
    return new Start(
        message.getRequestId(),
        message.getModel(),
        message.getSeed(),
        message.hasCreateTime() ? Durations.read(message.getCreateTime()) : null,
        message.getRelease(),
        message.getNumericsVersion(),
        List.copyOf(message.getPrompt().getTokenIdsList()),
        TokenScore.of(message.getPrompt().getScoresList()));
  }
}
