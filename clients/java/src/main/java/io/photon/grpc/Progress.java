package io.photon.grpc;

import com.google.protobuf.util.Durations;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.StreamGenerateResponse;
import io.photon.grpc.v1.TokenIds;
import io.photon.grpc.v1.Usage;
import java.time.Duration;

/** What a stream of one output has delivered, over all calls that it took, and the request for the rest. */
final class Progress {
  private final GenerateRequest first;
  private final long startedNanos = System.nanoTime();
  private final TokenIds.Builder delivered;
  /** Tokens delivered by the calls before this one. */
  private int carried;

  private boolean hasStarted;
  private boolean isComplete;
  private long seed;
  private String requestId = "";
  /** Of the server whose tokens came last. */
  private String numericsVersion = "";

  Progress(GenerateRequest request) {
    var asking = request.toBuilder();
    asking.getOutputBuilder().setTokenIds(true);
    first = asking.build();
    delivered = request.getContinueFrom().toBuilder();
  }

  /** Whether more than one output was asked for: they cannot be continued. */
  boolean hasManyOutputs() {
    return first.getSampling().getNumOutputs() > 1;
  }

  boolean hasStarted() {
    return hasStarted;
  }

  /** The last message has come: a status that was lost behind it says nothing more. */
  boolean isComplete() {
    return isComplete;
  }

  /** Count a message, and return it as it would have come in one call. */
  StreamGenerateResponse take(StreamGenerateResponse message) {
    for (var delta : message.getDeltasList()) {
      for (int i = 0; i < delta.getTokenIdsCount(); i++) {
        delivered.addIds(delta.getTokenIds(i));
      }
    }
    isComplete |= message.hasTiming();
    var isRepeated = hasStarted && message.hasStart() && isBitExact(message.getStart());
    if (message.hasStart()) {
      numericsVersion = message.getStart().getNumericsVersion();
      hasStarted = true;
      seed = message.getStart().getSeed();
      requestId = message.getStart().getRequestId();
    }
    var told = isRepeated ? message.toBuilder().clearStart().build() : message;
    return carried == 0 ? told : inOne(told);
  }

  /** Tell the log if a continuation is not; its start is passed on then. */
  private boolean isBitExact(io.photon.grpc.v1.GenerationStart start) {
    var isExact = Continuation.isBitExact(numericsVersion, start.getNumericsVersion());
    if (!isExact) {
      Continuation.tell(requestId, numericsVersion, start.getNumericsVersion());
    }
    return isExact;
  }

  /**
   * The request of the next call: it goes on behind what was delivered, for as long as is left, under the id that the
   * server reported, from which ids of tool calls derive.
   */
  GenerateRequest rest() {
    var request = first.toBuilder();
    carried = delivered.getIdsCount() - first.getContinueFrom().getIdsCount();
    if (hasStarted) {
      request.setRequestId(requestId).getSamplingBuilder().setSeed(seed);
    }
    if (delivered.getIdsCount() > 0) {
      request.setContinueFrom(delivered);
    }
    if (first.getStop().hasMaxDuration()) {
      request.getStopBuilder().setMaxDuration(left(first.getStop().getMaxDuration()));
    }
    if (first.getScheduling().hasTimeout()) {
      request.getSchedulingBuilder().setTimeout(left(first.getScheduling().getTimeout()));
    }
    return request.build();
  }

  /** The caller is told what all calls used together. */
  private StreamGenerateResponse inOne(StreamGenerateResponse message) {
    var told = message.toBuilder();
    if (message.hasUsage()) {
      told.setUsage(inOne(message.getUsage()));
    }
    for (var delta : told.getDeltasBuilderList()) {
      if (delta.hasUsage()) {
        delta.getUsageBuilder().setOutputTokens(delta.getUsage().getOutputTokens() + carried);
      }
    }
    return told.build();
  }

  private Usage inOne(Usage last) {
    var promptTokens = last.getPromptTokens() - carried;
    return last.toBuilder()
        .setPromptTokens(promptTokens)
        .setCachedPromptTokens(Math.min(last.getCachedPromptTokens(), promptTokens))
        .setOutputTokens(last.getOutputTokens() + carried)
        .build();
  }

  private com.google.protobuf.Duration left(com.google.protobuf.Duration whole) {
    var left = Durations.toNanos(whole) - (System.nanoTime() - startedNanos);
    return Durations.fromNanos(Math.max(left, Duration.ofMillis(1).toNanos()));
  }
}
