package io.photon.grpc;

import com.google.protobuf.Any;
import com.google.rpc.ErrorInfo;
import io.grpc.BindableService;
import io.grpc.Server;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.netty.NettyServerBuilder;
import io.grpc.protobuf.StatusProto;
import io.grpc.protobuf.services.HealthStatusManager;
import io.grpc.stub.StreamObserver;
import io.photon.grpc.v1.Feature;
import io.photon.grpc.v1.Finish;
import io.photon.grpc.v1.FinishReason;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.GenerateResponse;
import io.photon.grpc.v1.GenerationStart;
import io.photon.grpc.v1.GetModelRequest;
import io.photon.grpc.v1.GetModelResponse;
import io.photon.grpc.v1.InferenceServiceGrpc;
import io.photon.grpc.v1.Model;
import io.photon.grpc.v1.ModelServiceGrpc;
import io.photon.grpc.v1.MultiplexGenerateRequest;
import io.photon.grpc.v1.MultiplexGenerateResponse;
import io.photon.grpc.v1.MultiplexItem;
import io.photon.grpc.v1.Output;
import io.photon.grpc.v1.StreamGenerateResponse;
import io.photon.grpc.v1.Timing;
import io.photon.grpc.v1.TokenizeRequest;
import io.photon.grpc.v1.TokenizeResponse;
import io.photon.grpc.v1.Usage;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.BiConsumer;
import java.util.function.Function;

/** A server that answers each request as a test says, by every method that generates. */
final class ScriptedServer implements AutoCloseable {
  /** Messages, and how the call ends: null is well. */
  record Script(List<StreamGenerateResponse> messages, StatusRuntimeException end) {
    static Script of(StreamGenerateResponse... messages) {
      return new Script(List.of(messages), null);
    }

    static Script failing(StatusRuntimeException end, StreamGenerateResponse... messages) {
      return new Script(List.of(messages), end);
    }
  }

  static final StreamGenerateResponse HEARTBEAT = StreamGenerateResponse.newBuilder().setSequence(1).build();

  static final String RELEASE = "0.1.0";

  static final StreamGenerateResponse DONE =
      StreamGenerateResponse.newBuilder()
          .setStart(GenerationStart.newBuilder().setRelease(RELEASE))
          .addDeltas(
              Output.newBuilder()
                  .setText("done")
                  .setFinish(Finish.newBuilder().setReason(FinishReason.FINISH_REASON_EOS)))
          .setUsage(Usage.newBuilder().setOutputTokens(1))
          .setTiming(Timing.getDefaultInstance())
          .build();

  volatile Function<GenerateRequest, Script> script = request -> Script.of(DONE);
  /** Of GetModel; null: a new server's answer. */
  volatile StatusRuntimeException modelFailure;

  volatile List<Feature> features = List.of(Feature.FEATURE_UNKNOWN_FIELDS_REFUSED);

  final List<GenerateRequest> requests = new CopyOnWriteArrayList<>();
  final AtomicInteger asked = new AtomicInteger();
  final AtomicInteger tokenized = new AtomicInteger();
  private final int port;
  private Server server;

  ScriptedServer() throws IOException {
    server = listen(0);
    port = server.getPort();
  }

  String target() {
    return "127.0.0.1:" + port;
  }

  void restart() throws Exception {
    server.shutdownNow().awaitTermination();
    server = listen(port);
  }

  @Override
  public void close() {
    server.shutdownNow();
  }

  /** A failure as servers tell it. */
  static StatusRuntimeException failure(Status.Code code, String reason) {
    return failure(code, reason, "");
  }

  /** A failure that names a field. */
  static StatusRuntimeException failure(Status.Code code, String reason, String field) {
    var info =
        ErrorInfo.newBuilder().setReason(reason).setDomain("photon-grpc").putMetadata("field", field).build();
    var status = com.google.rpc.Status.newBuilder().setCode(code.value()).setMessage(reason);
    return StatusProto.toStatusRuntimeException(status.addDetails(Any.pack(info)).build());
  }

  private Server listen(int at) throws IOException {
    var health = new HealthStatusManager();
    health.setStatus("photon_grpc.v1.InferenceService", ServingStatus.SERVING);
    var builder = NettyServerBuilder.forAddress(new InetSocketAddress("127.0.0.1", at));
    for (var service : List.<BindableService>of(new Inference(), new Models(), health.getHealthService())) {
      builder.addService(service);
    }
    return builder.directExecutor().build().start();
  }

  private void play(
      GenerateRequest request,
      BiConsumer<GenerateRequest, StreamGenerateResponse> messages,
      BiConsumer<GenerateRequest, StatusRuntimeException> end) {
    requests.add(request);
    var played = script.apply(request);
    played.messages().forEach(message -> messages.accept(request, message));
    end.accept(request, played.end());
  }

  private final class Inference extends InferenceServiceGrpc.InferenceServiceImplBase {
    @Override
    public void generate(GenerateRequest request, StreamObserver<GenerateResponse> observer) {
      var whole = GenerateResponse.newBuilder();
      play(
          request,
          (asked, message) ->
              whole
                  .addAllOutputs(message.getDeltasList())
                  .setUsage(message.getUsage())
                  .setRelease(message.getStart().getRelease()),
          (asked, error) -> {
            if (error == null) {
              observer.onNext(whole.build());
            }
            end(observer, error);
          });
    }

    @Override
    public void streamGenerate(GenerateRequest request, StreamObserver<StreamGenerateResponse> observer) {
      play(request, (asked, message) -> observer.onNext(message), (asked, error) -> end(observer, error));
    }

    @Override
    public StreamObserver<MultiplexGenerateRequest> multiplexGenerate(
        StreamObserver<MultiplexGenerateResponse> observer) {
      return new StreamObserver<>() {
        private int handle;

        @Override
        public void onNext(MultiplexGenerateRequest action) {
          handle++;
          play(
              action.getGenerate(),
              (request, message) -> tell(item(request).setResponse(message)),
              (request, error) -> {
                if (error != null) {
                  tell(item(request).setError(StatusProto.fromThrowable(error)));
                }
              });
        }

        private MultiplexItem.Builder item(GenerateRequest request) {
          return MultiplexItem.newBuilder().setHandle(handle).setRequestId(request.getRequestId());
        }

        private void tell(MultiplexItem.Builder item) {
          observer.onNext(MultiplexGenerateResponse.newBuilder().addItems(item).build());
        }

        @Override
        public void onError(Throwable lost) {}

        @Override
        public void onCompleted() {
          observer.onCompleted();
        }
      };
    }
  }

  private final class Models extends ModelServiceGrpc.ModelServiceImplBase {
    @Override
    public void getModel(GetModelRequest request, StreamObserver<GetModelResponse> observer) {
      asked.incrementAndGet();
      if (modelFailure == null) {
        observer.onNext(GetModelResponse.newBuilder().setModel(Model.newBuilder().addAllFeatures(features)).build());
      }
      end(observer, modelFailure);
    }

    @Override
    public void tokenize(TokenizeRequest request, StreamObserver<TokenizeResponse> observer) {
      tokenized.incrementAndGet();
      observer.onNext(TokenizeResponse.newBuilder().addTokenIds(1).build());
      observer.onCompleted();
    }
  }

  private static void end(StreamObserver<?> observer, StatusRuntimeException error) {
    if (error == null) {
      observer.onCompleted();
    } else {
      observer.onError(error);
    }
  }
}
