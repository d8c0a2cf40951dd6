package photon_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

func TestThousandsOfRequestsShareOneStream(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	many := newClient(t, nil, f).Multiplex(t.Context())
	defer many.Close()
	const requests = 3000
	var wait sync.WaitGroup
	var wrong atomic.Int32
	for seed := range uint64(requests) {
		wait.Go(func() {
			result, err := many.Generate(t.Context(), photon.Text("x"), photon.WithSeed(seed))
			if err != nil || result.Text != fakeText(seed, 20) {
				wrong.Add(1)
			}
		})
	}
	wait.Wait()
	equal(t, "wrong", wrong.Load(), 0)
	equal(t, "asked", len(f.seen()), requests)
}

func TestOneThatFailsOrIsLeftHarmsNoOther(t *testing.T) {
	f := newFake(t)
	f.before = func(request *pb.GenerateRequest, n int) error {
		if request.RequestId == "bad" && n == 3 {
			return failure(codes.Internal, photon.NumericFailure, nil)
		}
		return nil
	}
	f.pause = time.Millisecond
	many := newClient(t, nil, f).Multiplex(t.Context())
	defer many.Close()
	good := many.Stream(t.Context(), photon.Text("x"), photon.WithMaxTokens(100))
	left := many.Stream(t.Context(), photon.Text("x"), photon.WithMaxTokens(100000))
	if _, err := many.Generate(t.Context(), photon.Text("x"), photon.WithRequestID("bad")); !errors.Is(err, photon.NumericFailure) {
		t.Error(err)
	}
	left.Close()
	equal(t, "text", read(t, good), fakeText(drawnSeed, 100))
	eventually(t, "cancelled", func() bool { return len(f.cancels()) == 1 })
}

func TestOneReaderThatIsSlowStopsNoOther(t *testing.T) {
	f := newFake(t)
	many := newClient(t, nil, f).Multiplex(t.Context())
	defer many.Close()
	slow := many.Stream(t.Context(), photon.Text("x"), photon.WithMaxTokens(5000))
	for range 10 {
		if _, err := many.Generate(t.Context(), photon.Text("x")); err != nil {
			t.Fatal(err)
		}
	}
	equal(t, "text", read(t, slow), fakeText(drawnSeed, 5000))
}

func TestAnIDInFlightOrTooLongIsRefusedAndItsOwnerGoesOn(t *testing.T) {
	f := newFake(t)
	f.pause = time.Millisecond
	many := newClient(t, nil, f).Multiplex(t.Context())
	defer many.Close()
	first := many.Stream(t.Context(), photon.Text("x"), photon.WithRequestID("known"))
	if _, err := many.Generate(t.Context(), photon.Text("y"), photon.WithRequestID("known")); !errors.Is(err, photon.DuplicateRequestId) {
		t.Error(err)
	}
	long := photon.WithRequestID(strings.Repeat("i", 129))
	if _, err := many.Generate(t.Context(), photon.Text("y"), long); !errors.Is(err, photon.InvalidRequest) {
		t.Error(err)
	}
	equal(t, "text", read(t, first), fakeText(drawnSeed, 20))
	if _, err := many.Generate(t.Context(), photon.Text("y"), photon.WithRequestID("known")); err != nil {
		t.Error("the id is free again:", err)
	}
}

func TestNewRequestsLeaveAServerThatDrains(t *testing.T) {
	t.Parallel()
	old, fresh := newFake(t), newFake(t)
	// Whichever was asked first drains from then on.
	var draining atomic.Pointer[fake]
	for _, f := range []*fake{old, fresh} {
		f.pause = time.Millisecond
		f.before = func(request *pb.GenerateRequest, n int) error {
			if draining.CompareAndSwap(nil, f); draining.Load() == f && n == 0 && request.RequestId != "first" {
				return failure(codes.Unavailable, photon.Draining, nil)
			}
			return nil
		}
	}
	many := newClient(t, nil, old, fresh).Multiplex(t.Context())
	defer many.Close()
	first := many.Stream(t.Context(), photon.Text("x"), photon.WithRequestID("first"), photon.WithMaxTokens(500))
	if _, err := first.Recv(); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		if _, err := many.Generate(t.Context(), photon.Text("x"), photon.WithRequestID(fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	equal(t, "the running one", len(read(t, first)), 499)
}

func TestTheEndOfASharedStreamEndsItsRequests(t *testing.T) {
	f := newFake(t)
	f.pause = time.Millisecond
	many := newClient(t, nil, f).Multiplex(t.Context())
	stream := many.Stream(t.Context(), photon.Text("x"), photon.WithMaxTokens(100000))
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	many.Close()
	for range stream.All() {
	}
	if _, err := stream.Recv(); !errors.Is(err, photon.Cancelled) {
		t.Error(err)
	}
	if _, err := many.Generate(t.Context(), photon.Text("x")); !errors.Is(err, photon.Cancelled) {
		t.Error(err)
	}
	eventually(t, "cancelled", func() bool { return len(f.cancels()) == 1 })
}

func TestAnIdleStreamWhosePlaceWasNeededIsOpenedAgainSilently(t *testing.T) {
	f := newFake(t)
	f.evictions.Store(3)
	// Not even retries are needed for it.
	many := newClient(t, []photon.ClientOption{photon.WithoutRetries()}, f).Multiplex(t.Context())
	defer many.Close()
	for seed := range uint64(3) {
		result, err := many.Generate(t.Context(), photon.Text("x"), photon.WithSeed(seed))
		if err != nil || result.Text != fakeText(seed, 20) {
			t.Fatal(seed, result, err)
		}
	}
	equal(t, "streams", f.streams.Load(), 4)
	equal(t, "asked", len(f.seen()), 3)
	f.evictions.Store(1000)
	if _, err := many.Generate(t.Context(), photon.Text("x")); !errors.Is(err, photon.IdleStreamEvicted) {
		t.Error("a server that takes every place away is full:", err)
	}
}
