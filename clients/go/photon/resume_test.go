package photon_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

const numTokens = 200

var lost = failure(codes.Unavailable, photon.EngineFailure, nil)

// cutAtRandom ends calls after some messages, as many as average.
func cutAtRandom(average int) func(*pb.GenerateRequest, int) error {
	return func(_ *pb.GenerateRequest, n int) error {
		if n > 0 && rand.IntN(average) == 0 {
			return lost
		}
		return nil
	}
}

func cutOnce(at int) func(*pb.GenerateRequest, int) error {
	var isDone atomic.Bool
	return func(_ *pb.GenerateRequest, n int) error {
		if n == at && !isDone.Swap(true) {
			return lost
		}
		return nil
	}
}

type source struct {
	name string
	open func(*testing.T, *photon.Client) photon.Caller
}

// Whatever holds for calls holds for requests of a shared stream.
var sources = []source{
	{"calls", func(_ *testing.T, client *photon.Client) photon.Caller { return client }},
	{"multiplexed", func(t *testing.T, client *photon.Client) photon.Caller {
		many := client.Multiplex(t.Context())
		t.Cleanup(many.Close)
		return many
	}},
}

func read(t *testing.T, stream *photon.Stream) string {
	t.Helper()
	var text strings.Builder
	for delta, err := range stream.All() {
		if err != nil {
			t.Fatal(err)
		}
		text.WriteString(delta.Text)
		if delta.TokenIDs != nil {
			t.Fatal("ids that nobody asked for")
		}
	}
	return text.String()
}

func TestAStreamCutAnywhereIsOneStreamToItsReader(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			f := newFake(t)
			f.before = cutAtRandom(20)
			caller := source.open(t, newClient(t, nil, f))
			for seed := range uint64(5) {
				stream := caller.Stream(t.Context(), photon.Text("x"), photon.WithSeed(seed), photon.WithMaxTokens(numTokens))
				equal(t, "text", read(t, stream), fakeText(seed, numTokens))
				equal(t, "usage", stream.Usage(), photon.Usage{PromptTokens: 5, CachedPromptTokens: stream.Usage().CachedPromptTokens, OutputTokens: numTokens})
			}
			if n := len(f.seen()); n < 20 {
				t.Fatalf("only %d calls: nothing was cut", n)
			}
		})
	}
}

func TestASeedThatTheServerDrewIsSentBack(t *testing.T) {
	f := newFake(t)
	f.before = cutOnce(7)
	client := newClient(t, nil, f)
	stream := client.Stream(t.Context(), photon.Text("x"), photon.WithRequestID("mine"), photon.WithMaxTokens(numTokens))
	equal(t, "text", read(t, stream), fakeText(drawnSeed, numTokens))
	equal(t, "id", stream.Start().RequestID, "mine")
	requests := f.seen()
	equal(t, "calls", len(requests), 2)
	equal(t, "ids sent back", len(requests[1].ContinueFrom.Ids), 7)
	equal(t, "seed sent back", requests[1].Sampling.GetSeed(), drawnSeed)
	equal(t, "id of the second call", requests[1].RequestId, "mine")
}

// The server assigns an id where the caller gives none, and may hold it for a while after the connection is lost.
func TestAStreamIsResumedUnderTheIDOfItsStart(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			f := newFake(t)
			f.assignedID = "assigned"
			cut, numHeld := cutOnce(7), atomic.Int32{}
			f.before = func(request *pb.GenerateRequest, n int) error {
				if request.ContinueFrom != nil && numHeld.Add(1) <= 2 {
					return failure(codes.AlreadyExists, photon.DuplicateRequestId, nil)
				}
				return cut(request, n)
			}
			stream := source.open(t, newClient(t, nil, f)).Stream(t.Context(), photon.Text("x"), photon.WithSeed(3), photon.WithMaxTokens(20))
			equal(t, "text", read(t, stream), fakeText(3, 20))
			requests := f.seen()
			equal(t, "calls", len(requests), 4)
			for _, resumed := range requests[1:] {
				equal(t, "id", resumed.RequestId, stream.Start().RequestID)
			}
		})
	}
}

func TestAnIDThatStaysTakenEndsTheStreamInTime(t *testing.T) {
	f := newFake(t)
	cut := cutOnce(5)
	f.before = func(request *pb.GenerateRequest, n int) error {
		if request.ContinueFrom != nil {
			return failure(codes.AlreadyExists, photon.DuplicateRequestId, nil)
		}
		return cut(request, n)
	}
	client := newClient(t, []photon.ClientOption{photon.WithResumeTimeout(200 * time.Millisecond)}, f)
	if _, err := client.Stream(t.Context(), photon.Text("x")).Collect(); !errors.Is(err, photon.DuplicateRequestId) {
		t.Fatal(err)
	}
}

func TestWhatTheCallerAlreadyHadIsPromptAndWhatCameIsOutput(t *testing.T) {
	f := newFake(t)
	f.before = cutOnce(10)
	had := []uint32{fakeToken(3, 0), fakeToken(3, 1)}
	stream := newClient(t, nil, f).Stream(t.Context(), photon.Text("x"), photon.WithSeed(3), photon.WithMaxTokens(50), photon.WithContinueFrom(had), photon.WithTokenIDs(true))
	var ids []uint32
	for delta, err := range stream.All() {
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, delta.TokenIDs...)
	}
	equal(t, "ids", len(ids), 48)
	equal(t, "prompt", stream.Usage().PromptTokens, 7)
	equal(t, "output", stream.Usage().OutputTokens, 48)
}

func TestLimitsOfTimeRunOnThroughACut(t *testing.T) {
	f := newFake(t)
	f.before, f.pause = cutOnce(10), 10*time.Millisecond
	stream := newClient(t, nil, f).Stream(t.Context(), photon.Text("x"), photon.WithMaxDuration(time.Minute), photon.WithTimeout(time.Minute))
	read(t, stream)
	again := f.seen()[1]
	for what, left := range map[string]time.Duration{
		"max_duration": again.Stop.MaxDuration.AsDuration(), "timeout": again.Scheduling.Timeout.AsDuration(),
	} {
		if left > time.Minute-100*time.Millisecond || left < 30*time.Second {
			t.Errorf("%s: %s are left", what, left)
		}
	}
	if stream.Timing().Total < 100*time.Millisecond {
		t.Errorf("the time before the cut is not in %s", stream.Timing().Total)
	}
}

func TestAnotherReplicaGoesOn(t *testing.T) {
	t.Parallel()
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			// Whichever of the two has the stream dies; the other one does not.
			first, second := newFake(t), newFake(t)
			var isDead atomic.Bool
			for _, f := range []*fake{first, second} {
				f.pause = time.Millisecond
				f.before = func(_ *pb.GenerateRequest, n int) error {
					if n == 20 && !isDead.Swap(true) {
						go f.server.Stop()
					}
					return nil
				}
			}
			caller := source.open(t, newClient(t, nil, first, second))
			text := read(t, caller.Stream(t.Context(), photon.Text("x"), photon.WithSeed(1), photon.WithMaxTokens(numTokens)))
			equal(t, "text", text, fakeText(1, numTokens))
			equal(t, "a replica died", isDead.Load(), true)
		})
	}
}

func TestWhatIsLostBehindTheLastMessageIsNothing(t *testing.T) {
	f := newFake(t)
	f.after = lost
	stream := newClient(t, nil, f).Stream(t.Context(), photon.Text("x"), photon.WithMaxTokens(3))
	equal(t, "text", read(t, stream), fakeText(drawnSeed, 3))
	equal(t, "calls", len(f.seen()), 1)
}

// gRPC itself repeats no call whose headers have come.
func TestACutBetweenHeadersAndOutputIsNotTheReadersConcern(t *testing.T) {
	f := newFake(t)
	f.sendsHeaders, f.before = true, cutOnce(0)
	stream := newClient(t, nil, f).Stream(t.Context(), photon.Text("x"), photon.WithMaxTokens(9))
	equal(t, "text", read(t, stream), fakeText(drawnSeed, 9))
	f.before = cutOnce(0)
	_, err := newClient(t, []photon.ClientOption{photon.WithoutRetries()}, f).Stream(t.Context(), photon.Text("x")).Collect()
	if !errors.Is(err, photon.EngineFailure) {
		t.Error(err)
	}
}

func TestSeveralOutputsAreNotResumedAndSaySo(t *testing.T) {
	f := newFake(t)
	f.before = cutOnce(5)
	_, err := newClient(t, nil, f).Stream(t.Context(), photon.Text("x"), photon.WithNumOutputs(3)).Collect()
	if !errors.Is(err, photon.EngineFailure) || !strings.Contains(err.Error(), "num_outputs 3 cannot be resumed") {
		t.Fatal(err)
	}
}

func TestWithoutResumeACutIsAnErrorAndNoIDsAreAskedFor(t *testing.T) {
	f := newFake(t)
	f.before = cutOnce(5)
	stream := newClient(t, []photon.ClientOption{photon.WithoutResume()}, f).Stream(t.Context(), photon.Text("x"))
	_, err := stream.Collect()
	if !errors.Is(err, photon.EngineFailure) || !errors.Is(err, photon.Unavailable) {
		t.Fatal(err)
	}
	equal(t, "token_ids", f.seen()[0].GetOutput().GetTokenIds(), false)
}

func TestAnErrorThatIsTheRequestsOwnIsNotResumed(t *testing.T) {
	f := newFake(t)
	f.before = func(_ *pb.GenerateRequest, n int) error {
		if n == 5 {
			return failure(codes.Internal, photon.NumericFailure, nil)
		}
		return nil
	}
	_, err := newClient(t, nil, f).Stream(t.Context(), photon.Text("x")).Collect()
	if !errors.Is(err, photon.NumericFailure) {
		t.Fatal(err)
	}
	equal(t, "calls", len(f.seen()), 1)
}

func TestAModelThatCannotContinueGivesTheErrorThatCut(t *testing.T) {
	f := newFake(t)
	f.before = func(request *pb.GenerateRequest, n int) error {
		if request.ContinueFrom != nil {
			return failure(codes.Unimplemented, photon.FeatureNotSupported, nil)
		}
		if n == 5 {
			return lost
		}
		return nil
	}
	_, err := newClient(t, nil, f).Stream(t.Context(), photon.Text("x")).Collect()
	if !errors.Is(err, photon.EngineFailure) {
		t.Fatal(err)
	}
}

func TestAStreamThatNobodyContinuesEndsWithTheReasonInTime(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.before = func(request *pb.GenerateRequest, n int) error {
		if n == 5 || request.ContinueFrom != nil {
			return lost
		}
		return nil
	}
	client := newClient(t, []photon.ClientOption{photon.WithResumeTimeout(time.Second)}, f)
	_, err := client.Stream(t.Context(), photon.Text("x")).Collect()
	if !errors.Is(err, photon.EngineFailure) {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = newClient(t, nil, f).Stream(ctx, photon.Text("x")).Collect()
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

func TestAForeignStatusThatCutsIsResumed(t *testing.T) {
	for _, code := range []codes.Code{codes.Unavailable, codes.Canceled} {
		f := newFake(t)
		var isDone atomic.Bool
		f.before = func(_ *pb.GenerateRequest, n int) error {
			if n == 5 && !isDone.Swap(true) {
				return status.Error(code, "a proxy went away")
			}
			return nil
		}
		text := read(t, newClient(t, nil, f).Stream(t.Context(), photon.Text("x"), photon.WithMaxTokens(30)))
		equal(t, code.String(), text, fakeText(drawnSeed, 30))
	}
}
