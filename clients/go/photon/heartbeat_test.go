package photon_test

import (
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// lostSoon is a failure after which to come back at once.
var lostSoon = failure(codes.Unavailable, photon.EngineFailure, nil, &errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)})

func TestHeartbeatsAreNotRead(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			f := newFake(t)
			f.heartbeats = 3
			caller := source.open(t, newClient(t, nil, f))
			stream := caller.Stream(t.Context(), photon.Text("x"), photon.WithHeartbeatInterval(time.Second), photon.WithMaxTokens(5))
			numDeltas := 0
			for {
				delta, err := stream.Recv()
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				numDeltas++
				equal(t, "text", delta.Text, fakeText(drawnSeed, 5)[numDeltas-1:numDeltas])
				equal(t, "seed", stream.Start().Seed, drawnSeed)
			}
			equal(t, "deltas", numDeltas, 5)
			equal(t, "asked for", f.seen()[0].GetStream().GetHeartbeatInterval().AsDuration(), time.Second)
		})
	}
}

func TestACallThatFailsAfterHeartbeatsIsSentAgain(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			for _, options := range [][]photon.ClientOption{nil, {photon.WithoutResume()}} {
				f := newFake(t)
				f.heartbeats = 2
				f.before = failing(2, lostSoon)
				caller := source.open(t, newClient(t, options, f))
				equal(t, "text", read(t, caller.Stream(t.Context(), photon.Text("x"), photon.WithSeed(1))), fakeText(1, 20))
				equal(t, "sent", len(f.seen()), 3)
			}
		})
	}
}

func TestACallThatFailsAfterHeartbeatsIsSentAsOftenAsThePolicySays(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			for want, options := range map[int][]photon.ClientOption{5: nil, 1: {photon.WithoutRetries()}} {
				f := newFake(t)
				f.heartbeats = 1
				f.before = func(*pb.GenerateRequest, int) error { return lostSoon }
				_, err := source.open(t, newClient(t, options, f)).Stream(t.Context(), photon.Text("x")).Collect()
				if !errors.Is(err, photon.EngineFailure) {
					t.Error(err)
				}
				equal(t, "sent", len(f.seen()), want)
			}
		})
	}
}
