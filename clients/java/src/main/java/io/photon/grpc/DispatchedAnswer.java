package io.photon.grpc;

import io.grpc.Deadline;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.GenerateResponse;
import java.util.concurrent.CompletableFuture;
import java.util.function.Function;

/** The answer to a request whose server may be asked first what it takes, or which may be sent in two forms. */
final class DispatchedAnswer extends CompletableFuture<GenerateResponse> {
  private final Dispatch dispatch;
  private final Deadline deadline;
  private final Function<GenerateRequest, CompletableFuture<GenerateResponse>> sender;

  DispatchedAnswer(
      Dispatch dispatch, Deadline deadline, Function<GenerateRequest, CompletableFuture<GenerateResponse>> sender) {
    this.dispatch = dispatch;
    this.deadline = deadline;
    this.sender = sender;
  }

  DispatchedAnswer begin() {
    var message = dispatch.message();
    if (message != null) {
      send(message);
    } else {
      dispatch.admitted(deadline).whenComplete(this::send);
    }
    return this;
  }

  private void send(GenerateRequest message, Throwable failure) {
    if (failure != null) {
      completeExceptionally(Statuses.error(failure));
    } else {
      send(message);
    }
  }

  private void send(GenerateRequest message) {
    var call = sender.apply(message);
    call.whenComplete(this::take);
    whenComplete((answer, failure) -> call.cancel(true));
  }

  private void arrived(GenerateResponse answer) {
    try {
      dispatch.arrived(answer.getRelease());
      complete(answer);
    } catch (PhotonException ignored) {
      completeExceptionally(ignored);
    }
  }

  private void take(GenerateResponse answer, Throwable failure) {
    if (failure == null) {
      arrived(answer);
    } else if (!isDone() && dispatch.again(Statuses.error(failure))) {
      begin();
    } else {
      completeExceptionally(failure);
    }
  }
}
