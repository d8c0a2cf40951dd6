package io.photon.grpc;

import io.photon.grpc.v1.GenerateResponse;
import java.time.Instant;
import java.util.List;

/**
 * The whole result of a call. The short forms are those of the first output; {@code usage} counts all outputs. {@code
 * release} is the server's version, and {@code numericsVersion} that of its numerics, "" where it is older than these fields,
 * as {@code createTime} is null. {@code isBitExact} is false where a server continued it that may compute other bits than
 * the first.
 */
public record Generation(
    String requestId,
    String model,
    long seed,
    Instant createTime,
    String release,
    String numericsVersion,
    boolean isBitExact,
    List<Output> outputs,
    Usage usage,
    Timing timing,
    List<Integer> promptTokenIds,
    List<TokenScore> promptScores) {
  static Generation of(GenerateResponse message, boolean withTokenIds) {
    return new Generation(
        message.getRequestId(),
        message.getModel(),
        message.getSeed(),
        message.hasCreateTime() ? Durations.read(message.getCreateTime()) : null,
        message.getRelease(),
        Continuation.first(message.getNumericsVersion()),
        !Continuation.isJoined(message.getNumericsVersion()),
        message.getOutputsList().stream().map(output -> Output.of(output, withTokenIds)).toList(),
        Usage.of(message.getUsage()),
        Timing.of(message.getTiming()),
        List.copyOf(message.getPrompt().getTokenIdsList()),
        TokenScore.of(message.getPrompt().getScoresList()));
  }

  public String text() {
    return outputs.get(0).text();
  }

  public List<Integer> tokenIds() {
    return outputs.get(0).tokenIds();
  }

  public Finish finish() {
    return outputs.get(0).finish();
  }

  public String reasoning() {
    return outputs.get(0).reasoning();
  }

  public String content() {
    return outputs.get(0).content();
  }

  public List<ToolCall> toolCalls() {
    return outputs.get(0).toolCalls();
  }
}
