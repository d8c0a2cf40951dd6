package photon_test

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// fake is a server whose model is a formula: token p of a request is a function of its seed and p alone, as the real
// one's is. Where it fails is up to the test.
type fake struct {
	pb.UnimplementedInferenceServiceServer
	pb.UnimplementedModelServiceServer
	address string
	health  *health.Server
	server  *grpc.Server

	// Before the n-th message of a call, from 0: an error ends the call, nil goes on. Set before the first call.
	before func(request *pb.GenerateRequest, n int) error
	// Behind the last message.
	after error
	// The version of its numerics that it sends with an answer; "" unless set.
	numerics func(*pb.GenerateRequest) string
	// The id of a request that has none.
	assignedID string
	// Headers go before the first message.
	sendsHeaders bool
	// Messages with only a sequence before the first one.
	heartbeats int
	// Of its model, and what GetModel fails with.
	features []pb.Feature
	refusal  error
	asked    atomic.Int32
	// It keeps no descriptor set.
	forgets bool
	sets    sync.Map
	// Between two messages.
	pause time.Duration
	// So many shared streams end as idle while a request is on its way to them.
	evictions atomic.Int32
	streams   atomic.Int32

	mu       sync.Mutex
	requests []*pb.GenerateRequest
	metadata []metadata.MD
	// Why the context of each call that did not end by itself was done.
	cancelled []error
	deadlines []time.Duration
}

func newFake(t *testing.T, options ...grpc.ServerOption) *fake {
	t.Helper()
	return listenFake(t, "tcp", "127.0.0.1:0", options...)
}

func listenFake(t *testing.T, network, address string, options ...grpc.ServerOption) *fake {
	t.Helper()
	listener, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{address: listener.Addr().String(), health: health.NewServer(), server: grpc.NewServer(options...)}
	f.health.SetServingStatus("photon_grpc.v1.InferenceService", healthpb.HealthCheckResponse_SERVING)
	healthpb.RegisterHealthServer(f.server, f.health)
	pb.RegisterInferenceServiceServer(f.server, f)
	pb.RegisterModelServiceServer(f.server, f)
	go f.server.Serve(listener)
	t.Cleanup(f.server.Stop)
	return f
}

// Ids are of the printable ASCII characters: the text of one is that character.
func fakeToken(seed uint64, position int) uint32 {
	return uint32(32 + (seed*31+uint64(position)*17+uint64(position*position))%95)
}

func fakeText(seed uint64, num int) string {
	var text strings.Builder
	for p := range num {
		text.WriteByte(byte(fakeToken(seed, p)))
	}
	return text.String()
}

const drawnSeed = 77

var arrival = timestamppb.New(time.Unix(1_700_000_000, 0))

func (f *fake) note(ctx context.Context, request *pb.GenerateRequest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, proto.CloneOf(request))
	given, _ := metadata.FromIncomingContext(ctx)
	f.metadata = append(f.metadata, given)
	left := time.Duration(0)
	if deadline, has := ctx.Deadline(); has {
		left = time.Until(deadline)
	}
	f.deadlines = append(f.deadlines, left)
}

func (f *fake) seen() []*pb.GenerateRequest {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]*pb.GenerateRequest(nil), f.requests...)
}

func (f *fake) cancels() []error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]error(nil), f.cancelled...)
}

func (f *fake) GetModel(context.Context, *pb.GetModelRequest) (*pb.GetModelResponse, error) {
	f.asked.Add(1)
	return &pb.GetModelResponse{Model: &pb.Model{Features: f.features}}, f.refusal
}

func (f *fake) Tokenize(context.Context, *pb.TokenizeRequest) (*pb.TokenizeResponse, error) {
	return &pb.TokenizeResponse{TokenIds: []uint32{1}}, nil
}

// findSet fails where a request has the digest of a set that did not come before.
func (f *fake) findSet(typed *pb.StructuredOutput_Protobuf) error {
	if set := typed.GetFileDescriptorSet(); set != nil && !f.forgets {
		f.sets.Store(sha256.Sum256(set), true)
		return nil
	}
	if typed == nil {
		return nil
	}
	if digest := typed.FileDescriptorSetSha256; len(digest) == sha256.Size {
		if _, known := f.sets.Load([sha256.Size]byte(digest)); known {
			return nil
		}
	}
	return failure(codes.FailedPrecondition, photon.DescriptorSetUnknown, nil)
}

// messages gives the messages of a request to send, until it fails.
func (f *fake) messages(ctx context.Context, request *pb.GenerateRequest, send func(*pb.StreamGenerateResponse) error) error {
	f.note(ctx, request)
	for n := range f.heartbeats {
		if err := send(&pb.StreamGenerateResponse{Sequence: int64(n + 1)}); err != nil {
			return err
		}
	}
	if err := f.findSet(request.GetStructuredOutput().GetProtobuf()); err != nil {
		return err
	}
	seed := uint64(drawnSeed)
	if request.Sampling != nil && request.Sampling.Seed != nil {
		seed = *request.Sampling.Seed
	}
	known := len(request.GetContinueFrom().GetIds())
	for i, id := range request.GetContinueFrom().GetIds() {
		if id != fakeToken(seed, i) {
			return status.Errorf(codes.Internal, "position %d was %d, not %d", i, fakeToken(seed, i), id)
		}
	}
	num := int(request.GetStop().GetMaxTokens())
	if num == 0 {
		num = 20
	}
	for n := 0; ; n++ {
		if f.before != nil {
			if err := f.before(request, n); err != nil {
				return err
			}
		}
		message := &pb.StreamGenerateResponse{Sequence: int64(f.heartbeats + n + 1)}
		if n == 0 {
			message.Start = &pb.GenerationStart{
				RequestId: cmp.Or(request.RequestId, f.assignedID), Model: "fake", Seed: seed, CreateTime: arrival, Release: "1.2.3",
			}
		}
		if n == 0 && f.numerics != nil {
			message.Start.NumericsVersion = f.numerics(request)
		}
		p := known + n
		if p < num {
			delta := &pb.Output{Text: string(rune(fakeToken(seed, p)))}
			if request.GetOutput().GetTokenIds() {
				delta.TokenIds = []uint32{fakeToken(seed, p)}
			}
			message.Deltas = []*pb.Output{delta}
		} else {
			message.Deltas = []*pb.Output{{}}
		}
		last := p >= num-1
		if last {
			message.Deltas[0].Finish = &pb.Finish{Reason: pb.FinishReason_FINISH_REASON_MAX_TOKENS}
			message.Deltas[0].Usage = &pb.OutputUsage{OutputTokens: uint32(num - known)}
			message.Usage = &pb.Usage{PromptTokens: uint32(5 + known), CachedPromptTokens: uint32(known), OutputTokens: uint32(num - known)}
			message.Timing = &pb.Timing{
				FirstTokenDuration: durationpb.New(time.Millisecond), TotalDuration: durationpb.New(2 * time.Millisecond),
			}
		}
		if err := send(message); err != nil {
			return err
		}
		if last {
			return f.after
		}
		select {
		case <-time.After(f.pause):
		case <-ctx.Done():
			f.mu.Lock()
			f.cancelled = append(f.cancelled, ctx.Err())
			f.mu.Unlock()
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}

func (f *fake) StreamGenerate(request *pb.GenerateRequest, stream grpc.ServerStreamingServer[pb.StreamGenerateResponse]) error {
	if f.sendsHeaders {
		stream.SendHeader(metadata.Pairs("x-photon-replica", "fake"))
	}
	return f.messages(stream.Context(), request, stream.Send)
}

func (f *fake) Generate(ctx context.Context, request *pb.GenerateRequest) (*pb.GenerateResponse, error) {
	answer := &pb.GenerateResponse{
		RequestId: request.RequestId, Outputs: []*pb.Output{{}}, CreateTime: arrival, Release: "1.2.3",
	}
	err := f.messages(ctx, request, func(message *pb.StreamGenerateResponse) error {
		for _, delta := range message.Deltas {
			answer.Outputs[0].Text += delta.Text
			answer.Outputs[0].Finish, answer.Outputs[0].Usage = delta.Finish, delta.Usage
		}
		answer.Usage, answer.Timing = message.Usage, message.Timing
		return nil
	})
	return answer, err
}

func (f *fake) MultiplexGenerate(stream grpc.BidiStreamingServer[pb.MultiplexGenerateRequest, pb.MultiplexGenerateResponse]) error {
	f.streams.Add(1)
	var mu sync.Mutex
	var wait sync.WaitGroup
	running := map[string]context.CancelFunc{}
	send := func(item *pb.MultiplexItem) error {
		mu.Lock()
		defer mu.Unlock()
		return stream.Send(&pb.MultiplexGenerateResponse{Items: []*pb.MultiplexItem{item}})
	}
	for handle := uint32(1); ; handle++ {
		action, err := stream.Recv()
		if err != nil {
			break
		}
		if cancel := action.GetCancel(); cancel != nil {
			mu.Lock()
			if end := running[cancel.RequestId]; end != nil {
				end()
			}
			mu.Unlock()
			continue
		}
		if f.evictions.Add(-1) >= 0 {
			stream.SetTrailer(metadata.Pairs("grpc-retry-pushback-ms", "-1"))
			return failure(codes.Unavailable, photon.IdleStreamEvicted, nil)
		}
		request := action.GetGenerate()
		ctx, cancel := context.WithCancel(stream.Context())
		mu.Lock()
		running[request.RequestId] = cancel
		mu.Unlock()
		wait.Go(func() {
			err := f.messages(ctx, request, func(message *pb.StreamGenerateResponse) error {
				item := &pb.MultiplexItem{Handle: handle, Item: &pb.MultiplexItem_Response{Response: message}}
				if message.Sequence == 1 {
					item.RequestId = request.RequestId
				}
				return send(item)
			})
			if err != nil {
				failed := status.Convert(err).Proto()
				send(&pb.MultiplexItem{
					Handle: handle, RequestId: request.RequestId, Item: &pb.MultiplexItem_Error{Error: failed},
				})
			}
		})
	}
	wait.Wait()
	return stream.Context().Err()
}

// failure is a status as the server makes them.
func failure(code codes.Code, reason photon.Reason, facts map[string]string, more ...protoadapt.MessageV1) error {
	info := &errdetails.ErrorInfo{Reason: string(reason), Domain: "photon-grpc", Metadata: facts}
	made, err := status.New(code, "as the test wants").WithDetails(append([]protoadapt.MessageV1{info}, more...)...)
	if err != nil {
		panic(err)
	}
	return made.Err()
}

func newClient(t *testing.T, options []photon.ClientOption, fakes ...*fake) *photon.Client {
	t.Helper()
	var addresses []string
	for _, f := range fakes {
		addresses = append(addresses, f.address)
	}
	return connect(t, "ipv4:"+strings.Join(addresses, ","), options...)
}

func connect(t *testing.T, target string, options ...photon.ClientOption) *photon.Client {
	t.Helper()
	client, err := photon.NewClient(target, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// eventually waits for what another goroutine is about to do.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for range 1000 {
		if holds() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("not within 10 s: " + what)
}

func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, fmt.Sprint(got), fmt.Sprint(want))
	}
}
