// Package photonotel passes on the trace context of OpenTelemetry. Programs that do not import it do not build
// OpenTelemetry.
package photonotel

import (
	"context"

	"go.opentelemetry.io/otel/propagation"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
)

// The form that servers read.
var propagator propagation.TraceContext

// WithTraceContext sends the span of each call's context with it, as W3C traceparent and tracestate. Retries, hedged
// calls and continuations of a stream have the span of the call that they belong to, requests of a multiplexed stream that
// of the context it was made with. Without a span nothing is sent; a traceparent that is in the context's outgoing
// metadata stays.
func WithTraceContext() photon.ClientOption {
	return photon.WithDialOptions(grpc.WithChainUnaryInterceptor(unary), grpc.WithChainStreamInterceptor(stream))
}

func unary(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	options ...grpc.CallOption,
) error {
	return invoke(traced(ctx), method, request, reply, conn, options...)
}

func stream(
	ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer,
	options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	return open(traced(ctx), desc, conn, method, options...)
}

func traced(ctx context.Context) context.Context {
	given, _ := metadata.FromOutgoingContext(ctx)
	for _, key := range propagator.Fields() {
		if len(given.Get(key)) > 0 {
			return ctx
		}
	}
	carrier := propagation.MapCarrier{}
	propagator.Inject(ctx, carrier)
	for key, value := range carrier {
		ctx = metadata.AppendToOutgoingContext(ctx, key, value)
	}
	return ctx
}
