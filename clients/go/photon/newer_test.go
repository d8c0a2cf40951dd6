package photon_test

import (
	"context"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// newer is a server that says what this client does not know yet: a state, a feature, a reason, a kind of message before
// the first and a kind of item of a multiplexed stream.
type newer struct {
	pb.UnimplementedInferenceServiceServer
	pb.UnimplementedModelServiceServer
}

var newerWhole = unknownBelow(&pb.StreamGenerateResponse{
	Start: &pb.GenerationStart{RequestId: "r", Seed: 7},
	Deltas: []*pb.Output{{
		Text: "ok", TokenIds: []uint32{5}, Finish: &pb.Finish{Reason: 1234}, ToolCalls: []*pb.ToolCall{{Name: "t"}},
		Scores: []*pb.TokenScore{{TokenId: 5}}, Usage: &pb.OutputUsage{}, Message: &pb.TypedMessage{},
	}},
	Usage:  &pb.Usage{},
	Timing: &pb.Timing{},
})

// unknownBelow adds a field that this client does not know to a message and to each within it.
func unknownBelow[M proto.Message](message M) M {
	addUnknown(message.ProtoReflect())
	return message
}

func addUnknown(message protoreflect.Message) {
	message.SetUnknown(protowire.AppendString(protowire.AppendTag(nil, 900, protowire.BytesType), "new"))
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.Message() == nil:
		case field.IsList():
			for i := range value.List().Len() {
				addUnknown(value.List().Get(i).Message())
			}
		default:
			addUnknown(value.Message())
		}
		return true
	})
}

func (newer) GetModel(context.Context, *pb.GetModelRequest) (*pb.GetModelResponse, error) {
	return unknownBelow(&pb.GetModelResponse{Model: &pb.Model{Name: "m", State: 99, Features: []pb.Feature{98}}}), nil
}

func (newer) Generate(context.Context, *pb.GenerateRequest) (*pb.GenerateResponse, error) {
	return unknownBelow(&pb.GenerateResponse{RequestId: "r", Seed: 7, Outputs: newerWhole.Deltas}), nil
}

func (newer) StreamGenerate(request *pb.GenerateRequest, stream grpc.ServerStreamingServer[pb.StreamGenerateResponse]) error {
	if err := stream.Send(&pb.StreamGenerateResponse{}); err != nil {
		return err
	}
	if request.ContinueFrom == nil {
		first := &pb.StreamGenerateResponse{Start: newerWhole.Start, Deltas: []*pb.Output{{Text: "a", TokenIds: []uint32{4}}}}
		if err := stream.Send(first); err != nil {
			return err
		}
		return failure(codes.Unavailable, photon.EngineFailure, nil)
	}
	return stream.Send(newerWhole)
}

func (newer) MultiplexGenerate(stream grpc.BidiStreamingServer[pb.MultiplexGenerateRequest, pb.MultiplexGenerateResponse]) error {
	for {
		action, err := stream.Recv()
		if err != nil {
			return nil
		}
		unknown := &pb.MultiplexItem{Handle: 1, RequestId: action.GetGenerate().GetRequestId()}
		known := &pb.MultiplexItem{Handle: 1, Item: &pb.MultiplexItem_Response{Response: newerWhole}}
		if err := stream.Send(&pb.MultiplexGenerateResponse{Items: []*pb.MultiplexItem{unknown, known}}); err != nil {
			return err
		}
	}
}

func serveNewer(t *testing.T) *photon.Client {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server, ready := grpc.NewServer(), health.NewServer()
	ready.SetServingStatus("photon_grpc.v1.InferenceService", healthpb.HealthCheckResponse_SERVING)
	healthpb.RegisterHealthServer(server, ready)
	pb.RegisterInferenceServiceServer(server, newer{})
	pb.RegisterModelServiceServer(server, newer{})
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return connect(t, listener.Addr().String())
}

func TestWhatANewerServerSaysIsNoFailure(t *testing.T) {
	client := serveNewer(t)
	model, err := client.Model(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "state", model.State.String(), "99")
	equal(t, "feature", model.Features[0].String(), "98")
	many := client.Multiplex(t.Context())
	defer many.Close()
	for want, caller := range map[string]photon.Caller{"aok": client, "ok": many} {
		told, err := caller.Stream(t.Context(), photon.Text("x")).Collect()
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "text", told.Text, want)
		equal(t, "reason", told.Finish.Reason, photon.FinishReason("1234"))
		equal(t, "seed", told.Seed, uint64(7))
		whole, err := caller.Generate(t.Context(), photon.Text("x"))
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "text", whole.Text, "ok")
	}
	equal(t, "fields that are new are kept", len(model.ProtoReflect().GetUnknown()) > 0, true)
}
