package io.photon.grpc;

import io.photon.grpc.v1.GenerateResponse;
import io.photon.grpc.v1.Output;
import io.photon.grpc.v1.StreamGenerateResponse;
import java.util.SortedMap;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;

/** All that a stream says, as one response. */
final class Gatherer extends CompletableFuture<GenerateResponse> implements MessageCall.Listener {
  private final GenerateResponse.Builder whole = GenerateResponse.newBuilder();
  private final SortedMap<Integer, Output.Builder> outputs = new TreeMap<>();
  private final MessageCall call;
  private boolean hasStarted;

  Gatherer(MessageCall call) {
    this.call = call;
  }

  Gatherer begin() {
    call.start(this);
    call.request(1);
    return this;
  }

  @Override
  public boolean cancel(boolean mayInterrupt) {
    var isCancelled = super.cancel(mayInterrupt);
    if (isCancelled) {
      call.cancel();
    }
    return isCancelled;
  }

  @Override
  public void onMessage(StreamGenerateResponse message) {
    if (message.hasStart() && hasStarted) {
      whole.setNumericsVersion(
          Continuation.join(whole.getNumericsVersion(), message.getStart().getNumericsVersion()));
    } else if (message.hasStart()) {
      hasStarted = true;
      var start = message.getStart();
      whole.setNumericsVersion(start.getNumericsVersion());
      whole.setRequestId(start.getRequestId()).setModel(start.getModel()).setSeed(start.getSeed());
      whole.setPrompt(start.getPrompt()).setRelease(start.getRelease());
      if (start.hasCreateTime()) {
        whole.setCreateTime(start.getCreateTime());
      }
    }
    message.getDeltasList().forEach(this::add);
    if (message.hasTiming()) {
      whole.setUsage(message.getUsage()).setTiming(message.getTiming());
    }
    call.request(1);
  }

  @Override
  public void onEnd(PhotonException error) {
    if (error != null) {
      completeExceptionally(error);
    } else {
      outputs.values().forEach(whole::addOutputs);
      complete(whole.build());
    }
  }

  private void add(Output delta) {
    Joins.join(outputs.computeIfAbsent(delta.getIndex(), index -> Output.newBuilder()), delta);
  }
}
