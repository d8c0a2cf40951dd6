package io.photon.grpc;

import com.google.common.util.concurrent.MoreExecutors;
import com.google.protobuf.Message;
import io.grpc.CallOptions;
import io.grpc.Context;
import io.grpc.Deadline;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.GenerateResponse;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.concurrent.ForkJoinPool;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/** The calls that generate, of a {@link Client} or over its {@link Multiplex}. For any number of threads. */
public abstract sealed class Generator permits Client, Multiplex {
  private final Duration defaultTimeout;
  private final boolean resumes;

  Generator(Duration defaultTimeout, boolean resumes) {
    this.defaultTimeout = defaultTimeout;
    this.resumes = resumes;
  }

  /** The whole result at once. */
  public Generation generate(Request request) {
    return Generation.of(whole(request), request.asksForTokenIds());
  }

  /** A message instead of text. Throw MessageMismatch where it was cut before it was whole. */
  public <T extends Message> T generate(Request request, Class<T> type) {
    var messageType = MessageType.of(type);
    return message(whole(typed(request, messageType)), messageType);
  }

  /** As {@link #generate(Request)}; cancelling the future ends the request on the server. */
  public CompletableFuture<Generation> generateAsync(Request request) {
    var withTokenIds = request.asksForTokenIds();
    return mapped(wholeAsync(request), response -> Generation.of(response, withTokenIds));
  }

  /** As {@link #generate(Request, Class)}; cancelling the future ends the request on the server. */
  public <T extends Message> CompletableFuture<T> generateAsync(Request request, Class<T> type) {
    var messageType = MessageType.of(type);
    return mapped(wholeAsync(typed(request, messageType)), response -> message(response, messageType));
  }

  /** The result as it is produced. */
  public GenerationStream stream(Request request) {
    var message = request.toProto();
    var deadline = deadline(request);
    return new GenerationStream(request.asksForTokenIds(), executor -> openStream(message, deadline, executor));
  }

  /** A message as it is filled. */
  public <T extends Message> MessageStream<T> stream(Request request, Class<T> type) {
    var messageType = MessageType.of(type);
    return new MessageStream<>(stream(typed(request, messageType)), messageType);
  }

  /** The result as it is produced, on demand; every subscription is a generation of its own. */
  public Flow.Publisher<Delta> publish(Request request) {
    var message = request.toProto();
    Function<Executor, MessageCall> opener = executor -> openStream(message, deadline(request), executor);
    return new DeltaPublisher(Generator::serialExecutor, opener, request.asksForTokenIds());
  }

  /** One call, which is not resumed. */
  abstract MessageCall open(GenerateRequest request, CallOptions options);

  /** Look again, now, for replicas that were gone. */
  abstract void reconnect();

  abstract Servers servers();

  /** What is tried again of a stream whose answer has begun without a message. */
  abstract DispatchedCall.Retries retries(boolean isResumed);

  abstract GenerateResponse whole(Request request);

  abstract CompletableFuture<GenerateResponse> wholeAsync(Request request);

  MessageCall openStream(GenerateRequest request, Deadline deadline, Executor executor) {
    var options = options(deadline).withExecutor(executor);
    return resumes
        ? new ResumingCall(request, executor, rest -> dispatched(rest, options), this::reconnect)
        : dispatched(request, options);
  }

  private MessageCall dispatched(GenerateRequest request, CallOptions options) {
    return new DispatchedCall(
        new Dispatch(servers(), request),
        options.getDeadline(),
        retries(resumes),
        options.getExecutor(),
        message -> open(message, options));
  }

  /** The options of a call that is made now. */
  static CallOptions options(Deadline deadline) {
    return TraceContext.on(CallOptions.DEFAULT.withDeadline(deadline));
  }

  /** The deadline of a call without options. */
  Deadline deadline() {
    return deadline((Duration) null);
  }

  Deadline deadline(Request request) {
    return deadline(request.timeout());
  }

  /** The call's; else that of the gRPC context; else the client's default. */
  private Deadline deadline(Duration timeout) {
    var inherited = Context.current().getDeadline();
    if (timeout == null && inherited != null) {
      return inherited;
    }
    return Deadline.after((timeout == null ? defaultTimeout : timeout).toNanos(), TimeUnit.NANOSECONDS);
  }

  /** Callbacks of one call: one after another, in a thread of the common pool. */
  static Executor serialExecutor() {
    return MoreExecutors.newSequentialExecutor(ForkJoinPool.commonPool());
  }

  /** The value of a future, which is cancelled where the thread is interrupted. Throw PhotonException. */
  static <T> T await(CompletableFuture<T> future) {
    try {
      return future.get();
    } catch (InterruptedException interrupted) {
      future.cancel(true);
      Thread.currentThread().interrupt();
      throw new PhotonException.Cancelled("the thread that waited was interrupted");
    } catch (ExecutionException failed) {
      throw Statuses.error(failed.getCause());
    }
  }

  /** A future of what {@code read} makes of another's value; cancelling it cancels the other. */
  private static <S, T> CompletableFuture<T> mapped(CompletableFuture<S> source, Function<S, T> read) {
    var result = source.thenApply(read);
    result.whenComplete(
        (value, failure) -> {
          if (result.isCancelled()) {
            source.cancel(true);
          }
        });
    return result;
  }

  private static Request typed(Request request, MessageType<?> type) {
    return request.with(message -> message.getStructuredOutputBuilder().setProtobuf(type.describe()));
  }

  private static <T extends Message> T message(GenerateResponse response, MessageType<T> type) {
    var output = response.getOutputs(0);
    if (!output.hasMessage()) {
      throw PhotonException.cut(type.name(), Finish.of(output.getFinish()));
    }
    return type.unpack(output.getMessage());
  }
}
