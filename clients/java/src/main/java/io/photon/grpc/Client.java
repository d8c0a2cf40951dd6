package io.photon.grpc;

import com.google.common.util.concurrent.FutureCallback;
import com.google.common.util.concurrent.Futures;
import com.google.common.util.concurrent.MoreExecutors;
import io.grpc.CallOptions;
import io.grpc.ChannelCredentials;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.health.v1.HealthGrpc;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import io.netty.channel.EventLoopGroup;
import io.photon.grpc.v1.DetokenizeRequest;
import io.photon.grpc.v1.Feature;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.GenerateResponse;
import io.photon.grpc.v1.GetModelRequest;
import io.photon.grpc.v1.GetModelResponse;
import io.photon.grpc.v1.InferenceServiceGrpc;
import io.photon.grpc.v1.ListModelsRequest;
import io.photon.grpc.v1.ModelServiceGrpc;
import io.photon.grpc.v1.TokenIds;
import io.photon.grpc.v1.TokenizeRequest;
import io.photon.grpc.v1.TokenizeResponse;
import java.io.IOException;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/**
 * Calls one server, or one name behind which several stand; for any number of threads. Failures are
 * {@link PhotonException}s.
 */
public final class Client extends Generator implements AutoCloseable {
  /** The health service's name for "a request sent now would run". */
  private static final String READINESS = "photon_grpc.v1.InferenceService";

  /** A replica that comes back is found within this, as by the other languages' clients. */
  private static final Duration LONGEST_RECONNECT = Duration.ofSeconds(5);

  /** A shared stream only sorts its frames into their readers' queues: in the connection's own thread. */
  private static final CallOptions IN_PLACE = CallOptions.DEFAULT.withExecutor(MoreExecutors.directExecutor());

  private static final Duration POLL = Duration.ofMillis(100);

  /** A connection ends within milliseconds; one that does not is left to its threads. */
  private static final Duration LONGEST_CLOSE = Duration.ofSeconds(1);

  private final String target;
  private final Duration defaultTimeout;
  private final boolean resumes;
  private final int retries;
  private final EventLoopGroup group;
  private final Servers servers = new Servers(this::refusesUnknownFields);
  final ManagedChannel channel;
  /** Connected only where it is used. */
  final ManagedChannel anyState;

  private Client(Builder builder) {
    super(builder.defaultTimeout, builder.resume);
    target = builder.target;
    defaultTimeout = builder.defaultTimeout;
    resumes = builder.resume;
    retries = builder.retries;
    group = Channels.group(target);
    channel = builder.channel(group, Channels.serviceConfig(builder.retries));
    anyState = builder.channel(group, Channels.serviceConfigOfAnyState(builder.retries));
    keepLooking();
  }

  /** A client without TLS or key. It connects with the first call. */
  public static Client connect(String target) {
    return builder(target).build();
  }

  /**
   * {@code target} is HOST:PORT, unix:PATH, ipv4:A:PORT,B:PORT for several replicas, or any name that gRPC resolves.
   */
  public static Builder builder(String target) {
    return new Builder(target);
  }

  /**
   * Many requests on one stream. Requests of thousands of callers may share one; see {@link Multiplex}. All are of the
   * span that is current now: a stream has one trace context.
   */
  public Multiplex multiplex() {
    var options = TraceContext.on(IN_PLACE);
    return new Multiplex(
        defaultTimeout,
        resumes,
        Math.min(retries, Channels.MAX_RETRIES),
        servers,
        () -> opened().newCall(InferenceServiceGrpc.getMultiplexGenerateMethod(), options),
        this::reconnect);
  }

  /** Every served model, the default one first. */
  public List<Model> models() {
    var found = new ArrayList<Model>();
    var request = ListModelsRequest.newBuilder();
    do {
      var page = model(ModelServiceGrpc.getListModelsMethod(), request.build());
      page.getModelsList().forEach(model -> found.add(Model.of(model)));
      request.setPageToken(page.getNextPageToken());
    } while (!request.getPageToken().isEmpty());
    return found;
  }

  /** One model; "" is the default one. Throw ModelNotFound. */
  public Model model(String name) {
    var request = GetModelRequest.newBuilder().setModel(name).build();
    return Model.of(model(ModelServiceGrpc.getGetModelMethod(), request).getModel());
  }

  /** The ids that {@code generate} would see for the text or chat of {@code request}. */
  public List<Integer> tokenize(Request request) {
    var prompt = request.toProto();
    var asked = TokenizeRequest.newBuilder().setModel(prompt.getModel());
    asked.setParseSpecialTokens(prompt.getParseSpecialTokens());
    switch (prompt.getInputCase()) {
      case TEXT -> asked.setText(prompt.getText());
      case CHAT -> asked.setChat(prompt.getChat());
      default -> throw new PhotonException.InvalidRequest("input", "is neither text nor a chat");
    }
    return tokenize(asked.build()).getTokenIdsList();
  }

  private TokenizeResponse tokenize(TokenizeRequest request) {
    var field = Cautious.first(request);
    if (field.isEmpty()) {
      return model(ModelServiceGrpc.getTokenizeMethod(), request);
    }
    var deadline = deadline();
    if (!await(servers.refuseUnknownFields(deadline))) {
      throw PhotonException.ignored(field);
    }
    return raised(
        () ->
            ClientCalls.blockingUnaryCall(channel, ModelServiceGrpc.getTokenizeMethod(), options(deadline), request));
  }

  /** The text that ids release. */
  public String detokenize(List<Integer> tokenIds) {
    var request = DetokenizeRequest.newBuilder().setTokenIds(TokenIds.newBuilder().addAllIds(tokenIds)).build();
    return model(ModelServiceGrpc.getDetokenizeMethod(), request).getText();
  }

  /** Whether a request sent now would run. Throw Unreachable where no server answers. */
  public boolean isReady() {
    return isReady(deadline());
  }

  private boolean isReady(Deadline deadline) {
    var request = HealthCheckRequest.newBuilder().setService(READINESS).build();
    var stub = HealthGrpc.newBlockingStub(anyState).withDeadline(deadline);
    return raised(() -> stub.check(request)).getStatus() == ServingStatus.SERVING;
  }

  /** Return when a request sent now would run. Throw Unreachable or ModelLoading when that took too long. */
  public void waitUntilReady(Duration timeout) {
    var deadline = Deadline.after(timeout.toNanos(), TimeUnit.NANOSECONDS);
    PhotonException missing = null;
    while (missing == null || !deadline.isExpired()) {
      try {
        if (isReady(deadline)) {
          return;
        }
        missing = PhotonException.notReady(target, timeout);
      } catch (PhotonException.Unavailable | PhotonException.DeadlinePassed absent) {
        missing = absent;
        reconnect();
      }
      sleep();
    }
    throw missing;
  }

  /**
   * End what still runs, close the connection and wait for its end, for at most a second: a program that unloads the
   * client's classes next, as {@code mvn exec:java} does, would take them from threads that still close it.
   */
  @Override
  public void close() {
    channel.shutdownNow();
    anyState.shutdownNow();
    var deadline = Deadline.after(LONGEST_CLOSE.toNanos(), TimeUnit.NANOSECONDS);
    try {
      channel.awaitTermination(deadline.timeRemaining(TimeUnit.NANOSECONDS), TimeUnit.NANOSECONDS);
      anyState.awaitTermination(deadline.timeRemaining(TimeUnit.NANOSECONDS), TimeUnit.NANOSECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
    if (group != null) {
      group.shutdownGracefully(0, 1, TimeUnit.SECONDS);
    }
  }

  @Override
  MessageCall open(GenerateRequest request, CallOptions options) {
    var call = opened().newCall(InferenceServiceGrpc.getStreamGenerateMethod(), options);
    return new StreamCall(call, request, channel::isShutdown);
  }

  @Override
  void reconnect() {
    channel.resetConnectBackoff();
    anyState.resetConnectBackoff();
  }

  @Override
  GenerateResponse whole(Request request) {
    if (request.hedgeAfter() != null) {
      return await(wholeAsync(request));
    }
    var dispatch = new Dispatch(servers, request.toProto());
    var message = dispatch.message();
    var options = options(deadline(request));
    if (message == null) {
      return await(wholeAsync(dispatch, options));
    }
    var answer = raised(
        () -> ClientCalls.blockingUnaryCall(channel, InferenceServiceGrpc.getGenerateMethod(), options, message));
    dispatch.arrived(answer.getRelease());
    return answer;
  }

  @Override
  CompletableFuture<GenerateResponse> wholeAsync(Request request) {
    var options = options(deadline(request));
    var message = request.toProto();
    return request.hedgeAfter() == null
        ? wholeAsync(new Dispatch(servers, message), options)
        : new Hedge(
            wholeAsync(new Dispatch(servers, message), options),
            () -> wholeAsync(new Dispatch(servers, hedge(message)), options),
            request.hedgeAfter());
  }

  private CompletableFuture<GenerateResponse> wholeAsync(Dispatch dispatch, CallOptions options) {
    return new DispatchedAnswer(dispatch, options.getDeadline(), message -> unary(message, options)).begin();
  }

  @Override
  Servers servers() {
    return servers;
  }

  /** A caller that resumes also continues what is cut before its first message. */
  @Override
  DispatchedCall.Retries retries(boolean isResumed) {
    var codes = isResumed ? Set.of(Status.Code.RESOURCE_EXHAUSTED) : RetryPolicy.ours().codes();
    return new DispatchedCall.Retries(Math.min(retries, Channels.MAX_RETRIES), codes);
  }

  private CompletableFuture<Boolean> refusesUnknownFields() {
    // Others wait for the answer, too: the context of the first one's caller may be cancelled.
    var before = Context.ROOT.attach();
    try {
      return refusesUnknownFields(channel.newCall(ModelServiceGrpc.getGetModelMethod(), options(deadline())));
    } finally {
      Context.ROOT.detach(before);
    }
  }

  private CompletableFuture<Boolean> refusesUnknownFields(ClientCall<GetModelRequest, GetModelResponse> call) {
    return answer(call, GetModelRequest.getDefaultInstance())
        .handle(
            (response, failure) -> {
              var error = failure == null ? null : Statuses.error(failure);
              if (error != null && error.code() != Status.Code.UNIMPLEMENTED) {
                throw error;
              }
              channel.notifyWhenStateChanged(channel.getState(false), servers::forget);
              var feature = Feature.FEATURE_UNKNOWN_FIELDS_REFUSED;
              return error == null && response.getModel().getFeaturesList().contains(feature);
            });
  }

  /** Where both calls come to one server after all, their ids must differ. */
  private static GenerateRequest hedge(GenerateRequest message) {
    var id = message.getRequestId();
    return id.isEmpty() ? message : message.toBuilder().setRequestId(id + "-hedge").build();
  }

  private CompletableFuture<GenerateResponse> unary(GenerateRequest message, CallOptions options) {
    return answer(channel.newCall(InferenceServiceGrpc.getGenerateMethod(), options), message);
  }

  private <Q, A> CompletableFuture<A> answer(ClientCall<Q, A> call, Q message) {
    var answer = ClientCalls.futureUnaryCall(call, message);
    var result = new CompletableFuture<A>();
    Futures.addCallback(
        answer,
        new FutureCallback<>() {
          @Override
          public void onSuccess(A response) {
            result.complete(response);
          }

          @Override
          public void onFailure(Throwable failure) {
            result.completeExceptionally(told(failure));
          }
        },
        MoreExecutors.directExecutor());
    result.whenComplete(
        (response, failure) -> {
          if (result.isCancelled()) {
            answer.cancel(true);
          }
        });
    return result;
  }

  /** gRPC for Java has no setting for the longest wait between attempts to connect, and waits up to two minutes. */
  private void keepLooking() {
    CompletableFuture.delayedExecutor(LONGEST_RECONNECT.toMillis(), TimeUnit.MILLISECONDS)
        .execute(
            () -> {
              if (!channel.isShutdown()) {
                reconnect();
                keepLooking();
              }
            });
  }

  private <Q, A> A model(MethodDescriptor<Q, A> method, Q request) {
    return raised(() -> ClientCalls.blockingUnaryCall(anyState, method, options(deadline()), request));
  }

  private <T> T raised(Supplier<T> call) {
    try {
      return call.get();
    } catch (StatusRuntimeException failed) {
      throw told(failed);
    }
  }

  private PhotonException told(Throwable failure) {
    return channel.isShutdown() ? new PhotonException.Closed("the client was closed") : Statuses.error(failure);
  }

  /** Throw Closed. */
  private ManagedChannel opened() {
    if (channel.isShutdown()) {
      throw new PhotonException.Closed("the client was closed");
    }
    return channel;
  }

  private static void sleep() {
    try {
      Thread.sleep(POLL.toMillis());
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw new PhotonException.Cancelled("the thread that waited was interrupted");
    }
  }

  /** What a connection needs beside its target. */
  public static final class Builder {
    private static final Metadata.Key<String> AUTHORIZATION =
        Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

    private final String target;
    private final Metadata metadata = new Metadata();
    private TlsChannelCredentials.Builder tls;
    private Duration defaultTimeout = Duration.ofSeconds(600);
    private int retries = Channels.MAX_RETRIES;
    private boolean resume = true;

    private Builder(String target) {
      this.target = target;
    }

    /** Encrypt, and trust the certificate authorities of the Java installation. */
    public Builder tls() {
      tls = TlsChannelCredentials.newBuilder();
      return this;
    }

    /** Encrypt, and trust the authorities in a PEM file. */
    public Builder tls(Path authorities) throws IOException {
      tls().tls.trustManager(authorities.toFile());
      return this;
    }

    /** Encrypt, trust the authorities in a PEM file, and present a client certificate (mTLS). */
    public Builder tls(Path authorities, Path certificate, Path key) throws IOException {
      tls(authorities).tls.keyManager(certificate.toFile(), key.toFile());
      return this;
    }

    /** Goes with every call as {@code authorization: Bearer KEY}; without TLS it can be read on its way. */
    public Builder apiKey(String key) {
      metadata.put(AUTHORIZATION, "Bearer " + key);
      return this;
    }

    /** Goes with every call. */
    public Builder metadata(String key, String value) {
      metadata.put(Metadata.Key.of(key, Metadata.ASCII_STRING_MARSHALLER), value);
      return this;
    }

    /** The deadline of calls that have none of their own. Unset: 600 s. */
    public Builder defaultTimeout(Duration timeout) {
      defaultTimeout = timeout;
      return this;
    }

    /** How often a call is sent again that failed before anything was received: 0 to 4. Unset: 4. */
    public Builder retries(int retries) {
      this.retries = retries;
      return this;
    }

    /** Off: a stream that is cut fails, and what came before stands. */
    public Builder resume(boolean resume) {
      this.resume = resume;
      return this;
    }

    public Client build() {
      return new Client(this);
    }

    private ChannelCredentials credentials() {
      return tls == null ? InsecureChannelCredentials.create() : tls.build();
    }

    private ManagedChannel channel(EventLoopGroup group, Map<String, Object> serviceConfig) {
      return Channels.builder(target, credentials(), group, serviceConfig)
          // The one that is named last comes first.
          .intercept(TraceContext.SENDER, MetadataUtils.newAttachHeadersInterceptor(metadata))
          .build();
    }
  }
}
