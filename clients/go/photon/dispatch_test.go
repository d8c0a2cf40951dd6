package photon_test

import (
	"crypto/sha256"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/photon-grpc/photon-grpc/clients/go/examples/acmev1"
	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// withLargeType asks for a message whose descriptor set has more than 4 KiB.
func withLargeType(t *testing.T) photon.Option {
	t.Helper()
	message := &descriptorpb.DescriptorProto{Name: proto.String("Large")}
	for n := range int32(100) {
		message.Field = append(message.Field, &descriptorpb.FieldDescriptorProto{
			Name:   proto.String(strings.Repeat("long_", 20) + string(rune('a'+n/26)) + string(rune('a'+n%26))),
			Number: proto.Int32(n + 1),
			Type:   descriptorpb.FieldDescriptorProto_TYPE_STRING.Enum(),
			Label:  descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(),
		})
	}
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("large.proto"), Syntax: proto.String("proto3"), MessageType: []*descriptorpb.DescriptorProto{message},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return photon.WithMessageType(dynamicpb.NewMessage(file.Messages().Get(0)))
}

// forms says of each request that a fake saw whether it had the set (s) or its digest (d).
func forms(f *fake) string {
	var told strings.Builder
	for _, request := range f.seen() {
		typed := request.GetStructuredOutput().GetProtobuf()
		switch {
		case typed == nil:
			continue
		case len(typed.FileDescriptorSet) > 0:
			told.WriteByte('s')
		case len(typed.FileDescriptorSetSha256) == sha256.Size:
			told.WriteByte('d')
		}
		if len(typed.FileDescriptorSet) > 0 && len(typed.FileDescriptorSetSha256) > 0 || typed.MessageType == "" {
			told.WriteByte('?')
		}
	}
	return told.String()
}

func TestALargeSetIsSentOnceThenByItsDigest(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			f := newFake(t)
			f.features = refusesUnknown
			caller, large := source.open(t, newClient(t, nil, f)), withLargeType(t)
			for range 3 {
				if _, err := caller.Stream(t.Context(), photon.Text("x"), large, photon.WithSeed(7)).Collect(); err != nil {
					t.Fatal(err)
				}
				result, err := caller.Generate(t.Context(), photon.Text("x"), large, photon.WithSeed(7))
				if err != nil {
					t.Fatal(err)
				}
				equal(t, "text", result.Text, fakeText(7, 20))
			}
			equal(t, "sent", forms(f), "sddddd")
			equal(t, "seed beside the digest", f.seen()[5].GetSampling().GetSeed(), uint64(7))
			equal(t, "asked for features", f.asked.Load(), 1)
			for range 2 {
				if _, err := caller.Generate(t.Context(), photon.Text("x"), photon.WithMessageType((*acmev1.Invoice)(nil))); err != nil {
					t.Fatal(err)
				}
			}
			equal(t, "a small set", forms(f), "sdddddss")
		})
	}
}

func TestAServerThatLostASetGetsItOnceMore(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			f := newFake(t)
			f.features = refusesUnknown
			caller, large := source.open(t, newClient(t, nil, f)), withLargeType(t)
			for range 2 {
				if _, err := caller.Stream(t.Context(), photon.Text("x"), large).Collect(); err != nil {
					t.Fatal(err)
				}
				f.sets.Clear()
			}
			equal(t, "sent", forms(f), "sds")
			f.forgets = true
			for _, want := range []string{"sdsds", "sdsdsds"} {
				if _, err := caller.Generate(t.Context(), photon.Text("x"), large); !errors.Is(err, photon.DescriptorSetUnknown) {
					t.Error(err)
				}
				equal(t, "never twice", forms(f), want)
			}
		})
	}
}

func TestReplicasInTurnEachLearnASet(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			replicas := []*fake{newFake(t), newFake(t)}
			for _, f := range replicas {
				f.features = refusesUnknown
			}
			client, large := newClient(t, nil, replicas...), withLargeType(t)
			connectToAll(t, client, replicas...)
			var withSet int
			for range 40 {
				caller := source.open(t, client) // a shared stream goes to one replica
				if _, err := caller.Generate(t.Context(), photon.Text("x"), large); err != nil {
					t.Fatal(err)
				}
			}
			for _, f := range replicas {
				told := forms(f)
				withSet += strings.Count(told, "s")
				if !strings.Contains(told, "d") || f.asked.Load() > 1 {
					t.Error(told, f.asked.Load())
				}
				// Once a replica has the set, its digest is enough.
				if _, after, _ := strings.Cut(told, "s"); strings.Count(after, "s") > 2 {
					t.Error(told)
				}
			}
			if withSet < 2 || withSet > 6 {
				t.Error("the set was sent", withSet, "times")
			}
		})
	}
}

func TestReplicasInTurnEachLearnASetByHedgedCalls(t *testing.T) {
	replicas := []*fake{newFake(t), newFake(t), newFake(t)}
	for _, f := range replicas {
		f.features = refusesUnknown
	}
	client, large := newClient(t, nil, replicas...), withLargeType(t)
	connectToAll(t, client, replicas...)
	for range 30 {
		if _, err := client.Generate(t.Context(), photon.Text("x"), large, photon.WithHedgeAfter(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range replicas {
		if told := forms(f); !strings.HasSuffix(told, "dddd") {
			t.Error(told)
		}
	}
}

func TestReplicasInTurnOfAnotherBalancerEachLearnASet(t *testing.T) {
	replicas := []*fake{newFake(t), newFake(t)}
	for _, f := range replicas {
		f.features = refusesUnknown
	}
	turns := photon.WithDialOptions(grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`))
	client, large := newClient(t, []photon.ClientOption{turns}, replicas...), withLargeType(t)
	connectToAll(t, client, replicas...)
	for range 40 {
		if _, err := client.Generate(t.Context(), photon.Text("x"), large); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range replicas {
		if told := forms(f); !strings.HasSuffix(told, "dddd") {
			t.Error(told)
		}
	}
}

func TestAServerThatKnowsNoDigestsGetsTheSet(t *testing.T) {
	for _, refusal := range []error{nil, status.Error(codes.PermissionDenied, "no")} {
		for _, source := range sources {
			t.Run(source.name, func(t *testing.T) {
				f := newFake(t)
				f.refusal = refusal
				caller, large := source.open(t, newClient(t, nil, f)), withLargeType(t)
				for range 4 {
					if _, err := caller.Generate(t.Context(), photon.Text("x"), large); err != nil {
						t.Fatal(err)
					}
				}
				equal(t, "sent", forms(f), "ssss")
				equal(t, "asked", f.asked.Load(), 1)
			})
		}
	}
}

func TestAStreamGoesOnWhereItsSetIsNotKnown(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			f := newFake(t)
			f.features = refusesUnknown
			caller, large := source.open(t, newClient(t, nil, f)), withLargeType(t)
			if _, err := caller.Generate(t.Context(), photon.Text("x"), large); err != nil {
				t.Fatal(err)
			}
			cut := cutOnce(5)
			f.before = func(request *pb.GenerateRequest, n int) error {
				err := cut(request, n)
				if err != nil {
					f.sets.Clear()
				}
				return err
			}
			equal(t, "text", read(t, caller.Stream(t.Context(), photon.Text("x"), large, photon.WithSeed(3))), fakeText(3, 20))
			equal(t, "sent", forms(f), "sdds")
		})
	}
}

func TestBothAttemptsOfAHedgedCallMayHaveADigest(t *testing.T) {
	replicas := []*fake{newFake(t), newFake(t)}
	for _, f := range replicas {
		f.features = refusesUnknown
		f.pause = time.Millisecond
	}
	client, large := newClient(t, nil, replicas...), withLargeType(t)
	connectToAll(t, client, replicas...)
	for range 4 {
		if _, err := client.Generate(t.Context(), photon.Text("x"), large, photon.WithHedgeAfter(0)); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.ContainsFunc(replicas, func(f *fake) bool { return strings.Contains(forms(f), "d") }) {
		t.Error(forms(replicas[0]), forms(replicas[1]))
	}
}
