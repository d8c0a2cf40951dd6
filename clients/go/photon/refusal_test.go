package photon_test

import (
	"errors"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/photon-grpc/photon-grpc/clients/go/examples/acmev1"
	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

var refusesUnknown = []pb.Feature{pb.Feature_FEATURE_UNKNOWN_FIELDS_REFUSED}

var (
	plainChat = photon.Chat{{Role: "user", Content: "weather?"}}
	withTools = photon.WithTools(photon.ToolOf((*acmev1.GetWeather)(nil), "weather"))
)

// Each field with the option needs_refusal that a caller can set.
var cautiousRequests = map[string]struct {
	chat    photon.Chat
	options []photon.Option
}{
	"chat.tools": {plainChat, []photon.Option{withTools}},
	"chat.messages[1].tool_calls": {
		append(plainChat, photon.Message{Role: "assistant", ToolCalls: []photon.ToolCall{{Name: "a"}}}), nil,
	},
	"chat.messages[0].parts": {photon.Chat{{Role: "user", Parts: []photon.Part{photon.TextPart("x")}}}, nil},
	"structured_output.protobuf.file_descriptor_set_sha256": {plainChat, []photon.Option{
		photon.WithRequest(func(request *pb.GenerateRequest) {
			typed := &pb.StructuredOutput_Protobuf{FileDescriptorSetSha256: make([]byte, 32)}
			request.StructuredOutput = &pb.StructuredOutput{Constraint: &pb.StructuredOutput_Protobuf_{Protobuf: typed}}
		}),
	}},
}

func wantRefusal(t *testing.T, err error, field string) {
	t.Helper()
	var failed *photon.Error
	if !errors.As(err, &failed) || !errors.Is(err, photon.FeatureNotSupported) || len(failed.Violations) != 1 {
		t.Fatal(err)
	}
	equal(t, "field", failed.Violations[0].Field, field)
	equal(t, "code", status.Code(err), codes.Unimplemented)
}

func TestAFieldThatAnOlderServerWouldIgnoreIsNotSent(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			f := newFake(t)
			caller := source.open(t, newClient(t, nil, f))
			for field, request := range cautiousRequests {
				_, err := caller.Generate(t.Context(), request.chat, request.options...)
				wantRefusal(t, err, field)
				_, err = caller.Stream(t.Context(), request.chat, request.options...).Collect()
				wantRefusal(t, err, field)
			}
			equal(t, "sent", len(f.seen()), 0)
			equal(t, "asked for features", f.asked.Load(), 1)
			if _, err := caller.Generate(t.Context(), plainChat); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestTokenizeIsRefusedWhereGenerateWouldBe(t *testing.T) {
	f := newFake(t)
	client := newClient(t, nil, f)
	_, err := client.Tokenize(t.Context(), plainChat, withTools)
	wantRefusal(t, err, "chat.tools")
	newer := newFake(t)
	newer.features = refusesUnknown
	if _, err := newClient(t, nil, newer).Tokenize(t.Context(), plainChat, withTools); err != nil {
		t.Error(err)
	}
}

func TestFeaturesAreAskedForOnceAndOnlyWhereTheyMatter(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			f := newFake(t)
			f.features = refusesUnknown
			caller := source.open(t, newClient(t, nil, f))
			if _, err := caller.Generate(t.Context(), plainChat); err != nil {
				t.Fatal(err)
			}
			equal(t, "asked for nothing", f.asked.Load(), 0)
			results := make(chan error)
			for range 20 {
				go func() {
					_, err := caller.Stream(t.Context(), plainChat, withTools).Collect()
					results <- err
				}()
			}
			for range 20 {
				if err := <-results; err != nil {
					t.Error(err)
				}
			}
			equal(t, "asked", f.asked.Load(), 1)
			equal(t, "tools", len(f.seen()[1].GetChat().Tools), 1)
		})
	}
}

func TestOnlyUpgradedReplicasGetAFieldThatOthersIgnore(t *testing.T) {
	old, upgraded := newFake(t), newFake(t)
	upgraded.features = refusesUnknown
	client := newClient(t, nil, old, upgraded)
	connectToAll(t, client, old, upgraded)
	before := len(old.seen())
	for range 8 {
		if _, err := client.Generate(t.Context(), plainChat, withTools); err != nil {
			t.Fatal(err)
		}
		if _, err := client.Stream(t.Context(), plainChat, withTools).Collect(); err != nil {
			t.Fatal(err)
		}
	}
	equal(t, "sent to the old one", len(old.seen()), before)
	if n := old.asked.Load(); n > 1 {
		t.Error("the old one was asked", n, "times")
	}
	equal(t, "the upgraded one was asked", upgraded.asked.Load(), 1)
}

func TestAServerIsAskedAgainAfterItsConnectionWasLost(t *testing.T) {
	f := newFake(t)
	client := newClient(t, nil, f)
	_, err := client.Generate(t.Context(), plainChat, withTools)
	wantRefusal(t, err, "chat.tools")
	f.server.Stop()
	upgraded := listenFake(t, "tcp", f.address)
	upgraded.features = refusesUnknown
	eventually(t, "the upgraded server answers", func() bool {
		_, err = client.Generate(t.Context(), plainChat, withTools)
		return err == nil
	})
	equal(t, "asked", upgraded.asked.Load(), 1)
}

func TestAnotherBalancerIsAskedAsAWhole(t *testing.T) {
	other := photon.WithDialOptions(grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"pick_first": {}}]}`))
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			old, upgraded := newFake(t), newFake(t)
			upgraded.features = refusesUnknown
			caller := source.open(t, newClient(t, []photon.ClientOption{other}, old))
			for range 2 {
				_, err := caller.Generate(t.Context(), plainChat, withTools)
				wantRefusal(t, err, "chat.tools")
			}
			equal(t, "asked", old.asked.Load(), 1)
			equal(t, "sent", len(old.seen()), 0)
			if _, err := source.open(t, newClient(t, []photon.ClientOption{other}, upgraded)).Generate(t.Context(), plainChat, withTools); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAFieldIsNotSentWhereTheServerDoesNotSayWhatItKnows(t *testing.T) {
	for code, want := range map[codes.Code]photon.Reason{
		codes.Unimplemented:    photon.FeatureNotSupported,
		codes.PermissionDenied: photon.ScopeRequired,
	} {
		for _, source := range sources {
			f := newFake(t)
			f.refusal = status.Error(code, "no")
			_, err := source.open(t, newClient(t, nil, f)).Generate(t.Context(), plainChat, withTools)
			if !errors.Is(err, want) || len(f.seen()) > 0 {
				t.Error(source.name, code, err, f.seen())
			}
		}
	}
}
