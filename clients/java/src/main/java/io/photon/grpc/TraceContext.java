package io.photon.grpc;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ForwardingClientCall.SimpleForwardingClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.opentelemetry.api.trace.propagation.W3CTraceContextPropagator;
import io.opentelemetry.context.Context;

/**
 * The span in which a call is made, told to the server as W3C trace context, where the program has OpenTelemetry: the
 * client does not bring it.
 */
final class TraceContext {
  private static final CallOptions.Key<Metadata> HEADERS = CallOptions.Key.create("photon-trace-context");
  private static final Metadata NONE = new Metadata();
  private static final String TRACEPARENT = "traceparent";
  private static final String TRACESTATE = "tracestate";
  private static final boolean IS_THERE = isThere();

  /**
   * The options of a call with the span that is current now. Attempts and continuations of the call, which begin in
   * other threads, keep it.
   */
  static CallOptions on(CallOptions options) {
    return options.withOption(HEADERS, IS_THERE ? Current.headers() : NONE);
  }

  /** Sends what is in a call's options, unless its metadata names a span. It must be the last before the wire. */
  static final ClientInterceptor SENDER =
      new ClientInterceptor() {
        @Override
        public <Q, A> ClientCall<Q, A> interceptCall(
            MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
          var trace = options.getOption(HEADERS);
          var call = next.newCall(method, options);
          return trace == null ? call : new TracedCall<>(call, trace);
        }
      };

  private static boolean isThere() {
    try {
      Class.forName(
          "io.opentelemetry.api.trace.propagation.W3CTraceContextPropagator",
          false,
          TraceContext.class.getClassLoader());
      return true;
    } catch (ClassNotFoundException | LinkageError absent) {
      return false;
    }
  }

  private static Metadata.Key<String> key(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
  }

  private static final class TracedCall<Q, A> extends SimpleForwardingClientCall<Q, A> {
    private final Metadata trace;

    TracedCall(ClientCall<Q, A> call, Metadata trace) {
      super(call);
      this.trace = trace;
    }

    @Override
    public void start(Listener<A> listener, Metadata headers) {
      if (!headers.containsKey(key(TRACEPARENT)) && !headers.containsKey(key(TRACESTATE))) {
        headers.merge(trace);
      }
      super.start(listener, headers);
    }
  }

  /** Loaded only where OpenTelemetry is there. */
  private static final class Current {
    /** Empty where no span is current. */
    static Metadata headers() {
      var headers = new Metadata();
      W3CTraceContextPropagator.getInstance()
          .inject(Context.current(), headers, (carrier, name, value) -> carrier.put(key(name), value));
      return headers;
    }
  }

  private TraceContext() {}
}
