package main

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// instant is a server without a model: the next token is always there. A request with stop.max_duration gets its first
// one and then nothing.
type instant struct {
	pb.UnimplementedInferenceServiceServer
}

// How long a shared stream waits for requests. A frame has one token of each, as an engine's step gives them.
const framePause = 200 * time.Microsecond

func serve() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	server := grpc.NewServer(grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second}))
	ready := health.NewServer()
	ready.SetServingStatus("photon_grpc.v1.InferenceService", healthpb.HealthCheckResponse_SERVING)
	healthpb.RegisterHealthServer(server, ready)
	pb.RegisterInferenceServiceServer(server, instant{})
	fmt.Println(listener.Addr())
	server.Serve(listener)
}

// message is the n-th of a request's, counted from 0.
func message(request *pb.GenerateRequest, n int) *pb.StreamGenerateResponse {
	delta := &pb.Output{Text: " token"}
	if request.GetOutput().GetTokenIds() {
		delta.TokenIds = []uint32{uint32(n)}
	}
	told := &pb.StreamGenerateResponse{Deltas: []*pb.Output{delta}, Sequence: int64(n + 1)}
	if n == 0 {
		told.Start = &pb.GenerationStart{RequestId: request.RequestId, Model: "instant"}
	}
	if n+1 == int(request.GetStop().GetMaxTokens()) {
		delta.Finish = &pb.Finish{Reason: pb.FinishReason_FINISH_REASON_MAX_TOKENS}
		told.Usage, told.Timing = &pb.Usage{OutputTokens: uint32(n + 1)}, &pb.Timing{}
	}
	return told
}

func (instant) Generate(_ context.Context, request *pb.GenerateRequest) (*pb.GenerateResponse, error) {
	return &pb.GenerateResponse{Outputs: []*pb.Output{{Text: " token"}}, Usage: &pb.Usage{}, Timing: &pb.Timing{}}, nil
}

func (instant) StreamGenerate(request *pb.GenerateRequest, stream grpc.ServerStreamingServer[pb.StreamGenerateResponse]) error {
	for n := range int(request.Stop.GetMaxTokens()) {
		if err := stream.Send(message(request, n)); err != nil {
			return err
		}
		if request.Stop.MaxDuration != nil {
			<-stream.Context().Done()
			return nil
		}
	}
	return nil
}

type running struct {
	request *pb.GenerateRequest
	handle  uint32
	num     int
}

func (instant) MultiplexGenerate(stream grpc.BidiStreamingServer[pb.MultiplexGenerateRequest, pb.MultiplexGenerateResponse]) error {
	var mu sync.Mutex
	var all []*running
	go func() {
		for handle := uint32(1); ; handle++ {
			action, err := stream.Recv()
			if err != nil {
				return
			}
			if request := action.GetGenerate(); request != nil {
				mu.Lock()
				all = append(all, &running{request: request, handle: handle})
				mu.Unlock()
			}
		}
	}()
	for stream.Context().Err() == nil {
		frame := &pb.MultiplexGenerateResponse{}
		mu.Lock()
		left := all[:0]
		for _, each := range all {
			item := &pb.MultiplexItem{Handle: each.handle}
			if each.num == 0 {
				item.RequestId = each.request.RequestId
			}
			item.Item = &pb.MultiplexItem_Response{Response: message(each.request, each.num)}
			frame.Items = append(frame.Items, item)
			if each.num++; each.num < int(each.request.Stop.GetMaxTokens()) && each.request.Stop.MaxDuration == nil {
				left = append(left, each)
			}
		}
		all = left
		mu.Unlock()
		if len(frame.Items) == 0 {
			time.Sleep(framePause)
			continue
		}
		if err := stream.Send(frame); err != nil {
			return err
		}
	}
	return stream.Context().Err()
}
