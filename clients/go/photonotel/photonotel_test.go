package photonotel_test

import (
	"context"
	"net"
	"sync"
	"testing"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	"github.com/photon-grpc/photon-grpc/clients/go/photonotel"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

const traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// server cuts every stream behind its first token, and notes what traceparents its calls have.
type server struct {
	pb.UnimplementedInferenceServiceServer
	mu    sync.Mutex
	calls [][]string
}

func (s *server) note(ctx context.Context) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	given, _ := metadata.FromIncomingContext(ctx)
	s.calls = append(s.calls, given.Get("traceparent"))
	return len(s.calls)
}

func failed(code codes.Code, reason photon.Reason) error {
	info := &errdetails.ErrorInfo{Reason: string(reason), Domain: "photon-grpc"}
	told, err := status.New(code, "as the test wants").WithDetails(info)
	if err != nil {
		panic(err)
	}
	return told.Err()
}

func (s *server) StreamGenerate(request *pb.GenerateRequest, stream grpc.ServerStreamingServer[pb.StreamGenerateResponse]) error {
	// The first attempt of all is refused, so that gRPC sends it again.
	if s.note(stream.Context()) == 1 {
		return failed(codes.Unavailable, photon.ModelLoading)
	}
	message := &pb.StreamGenerateResponse{
		Start:  &pb.GenerationStart{RequestId: "r", Seed: 7},
		Deltas: []*pb.Output{{Text: "a", TokenIds: []uint32{4}}},
	}
	if request.ContinueFrom == nil {
		if err := stream.Send(message); err != nil {
			return err
		}
		return failed(codes.Unavailable, photon.EngineFailure)
	}
	message.Timing = &pb.Timing{}
	return stream.Send(message)
}

func (s *server) Generate(ctx context.Context, _ *pb.GenerateRequest) (*pb.GenerateResponse, error) {
	s.note(ctx)
	return &pb.GenerateResponse{Outputs: []*pb.Output{{Text: "ok"}}}, nil
}

func (s *server) MultiplexGenerate(stream grpc.BidiStreamingServer[pb.MultiplexGenerateRequest, pb.MultiplexGenerateResponse]) error {
	s.note(stream.Context())
	return failed(codes.InvalidArgument, photon.InvalidRequest)
}

func serve(t *testing.T) (*server, *photon.Client) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	listening, ready, noting := grpc.NewServer(), health.NewServer(), &server{}
	ready.SetServingStatus("photon_grpc.v1.InferenceService", healthpb.HealthCheckResponse_SERVING)
	healthpb.RegisterHealthServer(listening, ready)
	pb.RegisterInferenceServiceServer(listening, noting)
	go listening.Serve(listener)
	t.Cleanup(listening.Stop)
	client, err := photon.NewClient(listener.Addr().String(), photonotel.WithTraceContext())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return noting, client
}

func spanned(ctx context.Context) context.Context {
	id, _ := trace.TraceIDFromHex("0af7651916cd43dd8448eb211c80319c")
	span, _ := trace.SpanIDFromHex("b7ad6b7169203331")
	config := trace.SpanContextConfig{TraceID: id, SpanID: span, TraceFlags: trace.FlagsSampled}
	return trace.ContextWithSpanContext(ctx, trace.NewSpanContext(config))
}

func TestEveryCallOfARequestHasTheSpanOfItsContext(t *testing.T) {
	noting, client := serve(t)
	ctx := spanned(t.Context())
	told, err := client.Stream(ctx, photon.Text("x")).Collect()
	if err != nil || told.Text != "aa" {
		t.Fatal(told, err)
	}
	if _, err := client.Generate(ctx, photon.Text("x")); err != nil {
		t.Fatal(err)
	}
	many := client.Multiplex(ctx)
	defer many.Close()
	// The request has no span; the stream that it opens has that of the Multiplex.
	many.Generate(t.Context(), photon.Text("x"))
	if len(noting.calls) != 5 {
		t.Fatal(noting.calls)
	}
	for n, given := range noting.calls {
		if len(given) != 1 || given[0] != traceparent {
			t.Error(n, given)
		}
	}
}

func TestWithoutASpanNothingIsSentAndWhatTheCallerGivesStays(t *testing.T) {
	noting, client := serve(t)
	own := metadata.AppendToOutgoingContext(spanned(t.Context()), "traceparent", "own")
	for _, ctx := range []context.Context{t.Context(), own} {
		if _, err := client.Generate(ctx, photon.Text("x")); err != nil {
			t.Fatal(err)
		}
	}
	if len(noting.calls[0]) != 0 || len(noting.calls[1]) != 1 || noting.calls[1][0] != "own" {
		t.Error(noting.calls)
	}
}
