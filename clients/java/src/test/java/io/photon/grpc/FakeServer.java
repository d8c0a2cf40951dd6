package io.photon.grpc;

import com.google.protobuf.Any;
import com.google.rpc.ErrorInfo;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.ServerInterceptors;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.netty.NettyServerBuilder;
import io.grpc.protobuf.StatusProto;
import io.grpc.protobuf.services.HealthStatusManager;
import io.grpc.stub.ServerCallStreamObserver;
import io.grpc.stub.StreamObserver;
import io.photon.grpc.v1.Finish;
import io.photon.grpc.v1.FinishReason;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.GenerateResponse;
import io.photon.grpc.v1.GenerationStart;
import io.photon.grpc.v1.InferenceServiceGrpc;
import io.photon.grpc.v1.MultiplexGenerateRequest;
import io.photon.grpc.v1.MultiplexGenerateResponse;
import io.photon.grpc.v1.MultiplexItem;
import io.photon.grpc.v1.Output;
import io.photon.grpc.v1.StreamGenerateResponse;
import io.photon.grpc.v1.Timing;
import io.photon.grpc.v1.Usage;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * A server without a model, behind a real socket: token p of seed s is a fixed function of both, and continue_from goes
 * on as the real one does. One token a message, as fast as the reader takes them or one each {@code pauseMillis}.
 */
final class FakeServer extends InferenceServiceGrpc.InferenceServiceImplBase implements AutoCloseable {
  final AtomicInteger cancelled = new AtomicInteger();
  final AtomicInteger written = new AtomicInteger();
  /** Messages after which streams stand still. */
  volatile int standsAfter = Integer.MAX_VALUE;

  /** Told to a request of a multiplexed stream the first so many times that it comes. */
  volatile com.google.rpc.Status refusal;

  volatile int refusals;

  /** So many multiplexed streams end as idle while a request is on its way to them. */
  final AtomicInteger evictions = new AtomicInteger();

  final AtomicInteger streams = new AtomicInteger();

  final List<GenerateRequest> requests = new CopyOnWriteArrayList<>();
  /** Of calls of the InferenceService. */
  final List<Metadata> headers = new CopyOnWriteArrayList<>();

  private final ScheduledExecutorService clock = Executors.newScheduledThreadPool(1);
  private final int pauseMillis;
  private final boolean answersUnary;
  private final int port;
  private Server server;

  FakeServer(int pauseMillis, boolean answersUnary) throws IOException {
    this.pauseMillis = pauseMillis;
    this.answersUnary = answersUnary;
    server = listen(0);
    port = server.getPort();
  }

  String target() {
    return "127.0.0.1:" + port;
  }

  /** Cut every connection at once. */
  void kill() throws InterruptedException {
    server.shutdownNow().awaitTermination();
  }

  void restart() throws IOException {
    server = listen(port);
  }

  @Override
  public void close() {
    server.shutdownNow();
    clock.shutdownNow();
  }

  @Override
  public void generate(GenerateRequest request, StreamObserver<GenerateResponse> observer) {
    note(request);
    ((ServerCallStreamObserver<GenerateResponse>) observer).setOnCancelHandler(cancelled::incrementAndGet);
    if (answersUnary) {
      var whole = GenerateResponse.newBuilder().setModel("fake").setSeed(request.getSampling().getSeed());
      whole.addOutputs(Output.newBuilder().setText("done").setFinish(finish()));
      observer.onNext(whole.build());
      observer.onCompleted();
    }
  }

  @Override
  public void streamGenerate(GenerateRequest request, StreamObserver<StreamGenerateResponse> observer) {
    note(request);
    var call = (ServerCallStreamObserver<StreamGenerateResponse>) observer;
    var messages = messages(request);
    call.setOnCancelHandler(cancelled::incrementAndGet);
    if (pauseMillis > 0) {
      Future<?>[] ticks = new Future<?>[1];
      ticks[0] =
          clock.scheduleAtFixedRate(
              () -> {
                if (call.isCancelled() || written.get() < standsAfter && !write(call, messages)) {
                  ticks[0].cancel(false);
                }
              },
              0,
              pauseMillis,
              TimeUnit.MILLISECONDS);
    } else {
      call.setOnReadyHandler(
          () -> {
            while (call.isReady() && write(call, messages)) {}
          });
    }
  }

  /** All requests of a stream advance together, a token each in every frame. */
  @Override
  public StreamObserver<MultiplexGenerateRequest> multiplexGenerate(
      StreamObserver<MultiplexGenerateResponse> observer) {
    var call = (ServerCallStreamObserver<MultiplexGenerateResponse>) observer;
    streams.incrementAndGet();
    var running = new HashMap<Integer, Iterator<StreamGenerateResponse>>();
    var ids = new HashMap<Integer, String>();
    var asked = new HashMap<String, Integer>();
    call.setOnCancelHandler(cancelled::incrementAndGet);
    Runnable advance =
        () -> {
          while (call.isReady() && !running.isEmpty()) {
            call.onNext(frame(running, ids));
          }
        };
    call.setOnReadyHandler(advance);
    return new StreamObserver<>() {
      @Override
      public void onNext(MultiplexGenerateRequest action) {
        if (action.hasGenerate() && evictions.getAndDecrement() > 0) {
          call.onError(evicted());
        } else if (action.hasGenerate()) {
          note(action.getGenerate());
          var id = action.getGenerate().getRequestId();
          ids.put(ids.size() + 1, id);
          if (asked.merge(id, 1, Integer::sum) <= refusals) {
            var item = MultiplexItem.newBuilder().setHandle(ids.size()).setRequestId(id).setError(refusal);
            call.onNext(MultiplexGenerateResponse.newBuilder().addItems(item).build());
          } else {
            running.put(ids.size(), messages(action.getGenerate()));
          }
        } else {
          cancelled.incrementAndGet();
          running.keySet().removeIf(handle -> ids.get(handle).equals(action.getCancel().getRequestId()));
        }
        advance.run();
      }

      @Override
      public void onError(Throwable lost) {}

      @Override
      public void onCompleted() {}
    };
  }

  private static StatusRuntimeException evicted() {
    var info = ErrorInfo.newBuilder().setReason("IDLE_STREAM_EVICTED").setDomain("photon-grpc");
    var status = com.google.rpc.Status.newBuilder().setCode(Status.Code.UNAVAILABLE.value()).setMessage("idle");
    var told = StatusProto.toStatusRuntimeException(status.addDetails(Any.pack(info.build())).build());
    told.getTrailers().put(Metadata.Key.of("grpc-retry-pushback-ms", Metadata.ASCII_STRING_MARSHALLER), "-1");
    return told;
  }

  /** What a client is to tell of a request, whatever happens on the way. */
  static List<Integer> tokens(GenerateRequest request) {
    var seed = request.getSampling().getSeed();
    var tokens = new ArrayList<Integer>();
    for (int position = 0; position < request.getStop().getMaxTokens(); position++) {
      tokens.add(token(seed, position));
    }
    return tokens;
  }

  static String text(List<Integer> tokens) {
    var text = new StringBuilder();
    tokens.forEach(token -> text.append(' ').append(token));
    return text.toString();
  }

  private Server listen(int at) throws IOException {
    var health = new HealthStatusManager();
    health.setStatus("photon_grpc.v1.InferenceService", ServingStatus.SERVING);
    return NettyServerBuilder.forAddress(new InetSocketAddress("127.0.0.1", at))
        .permitKeepAliveTime(5, TimeUnit.SECONDS)
        .permitKeepAliveWithoutCalls(true)
        .addService(ServerInterceptors.intercept(this, noting()))
        .addService(health.getHealthService())
        .build()
        .start();
  }

  private ServerInterceptor noting() {
    return new ServerInterceptor() {
      @Override
      public <Q, A> ServerCall.Listener<Q> interceptCall(
          ServerCall<Q, A> call, Metadata given, ServerCallHandler<Q, A> next) {
        headers.add(given);
        return next.startCall(call, given);
      }
    };
  }

  private void note(GenerateRequest request) {
    requests.add(request);
  }

  private boolean write(ServerCallStreamObserver<StreamGenerateResponse> call, Iterator<StreamGenerateResponse> from) {
    if (!from.hasNext()) {
      return false;
    }
    written.incrementAndGet();
    call.onNext(from.next());
    if (!from.hasNext()) {
      call.onCompleted();
    }
    return from.hasNext();
  }

  private static MultiplexGenerateResponse frame(
      Map<Integer, Iterator<StreamGenerateResponse>> running, Map<Integer, String> ids) {
    var frame = MultiplexGenerateResponse.newBuilder();
    running
        .entrySet()
        .removeIf(
            each -> {
              var message = each.getValue().next();
              var item = MultiplexItem.newBuilder().setHandle(each.getKey()).setResponse(message);
              if (message.hasStart()) {
                item.setRequestId(ids.get(each.getKey()));
              }
              frame.addItems(item);
              return !each.getValue().hasNext();
            });
    return frame.build();
  }

  private static Iterator<StreamGenerateResponse> messages(GenerateRequest request) {
    var before = request.getContinueFrom().getIdsCount();
    var end = request.getStop().getMaxTokens();
    return new Iterator<>() {
      private int position = before;

      @Override
      public boolean hasNext() {
        return position < end;
      }

      @Override
      public StreamGenerateResponse next() {
        var message = StreamGenerateResponse.newBuilder();
        if (position == before) {
          var start = GenerationStart.newBuilder().setRequestId(request.getRequestId()).setModel("fake");
          message.setStart(start.setSeed(request.getSampling().getSeed()));
        }
        var token = token(request.getSampling().getSeed(), position++);
        var delta = message.addDeltasBuilder().setText(" " + token);
        if (request.getOutput().getTokenIds()) {
          delta.addTokenIds(token);
        }
        if (position == end) {
          delta.setFinish(finish());
          message.setUsage(Usage.newBuilder().setPromptTokens(3 + before).setOutputTokens(end - before));
          message.setTiming(Timing.getDefaultInstance());
        }
        return message.build();
      }
    };
  }

  private static Finish finish() {
    return Finish.newBuilder().setReason(FinishReason.FINISH_REASON_MAX_TOKENS).build();
  }

  private static int token(long seed, int position) {
    return (int) Math.floorMod((seed + 1) * 2_654_435_761L + position * 40_503L, 50_000L);
  }
}
