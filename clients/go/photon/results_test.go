package photon_test

import (
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/photon-grpc/photon-grpc/clients/go/examples/acmev1"
	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

func TestAResultSaysWhenAndByWhichReleaseAndCountsEachOutput(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			caller := source.open(t, newClient(t, nil, newFake(t)))
			whole, err := caller.Generate(t.Context(), photon.Text("x"), photon.WithMaxTokens(6))
			if err != nil {
				t.Fatal(err)
			}
			joined, err := caller.Stream(t.Context(), photon.Text("x"), photon.WithMaxTokens(6)).Collect()
			if err != nil {
				t.Fatal(err)
			}
			for _, result := range []*photon.Generation{whole, joined} {
				equal(t, "create time", result.CreateTime.Equal(arrival.AsTime()), true)
				equal(t, "release", result.Release, "1.2.3")
				equal(t, "tokens of the output", result.Output.Usage.OutputTokens, 6)
				equal(t, "tokens", result.Usage.OutputTokens, 6)
			}
		})
	}
}

func TestTheTokensOfAnOutputAreThoseOfAllItsParts(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			f := newFake(t)
			f.before = cutOnce(5)
			joined, err := source.open(t, newClient(t, nil, f)).Stream(t.Context(), photon.Text("x")).Collect()
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "tokens of the output", joined.Output.Usage.OutputTokens, 20)
		})
	}
}

func TestATypedMessageIsUnpackedAsItsOwnTypeOnly(t *testing.T) {
	invoice := &acmev1.Invoice{Number: "17"}
	packed, err := anypb.New(invoice)
	if err != nil {
		t.Fatal(err)
	}
	message := &pb.TypedMessage{TypeUrl: packed.TypeUrl, Value: packed.Value}
	unpacked := &acmev1.Invoice{}
	if err := photon.Unpack(message, unpacked); err != nil || !proto.Equal(unpacked, invoice) {
		t.Error(unpacked, err)
	}
	err = photon.Unpack(message, &acmev1.GetWeather{})
	var wrong *photon.WrongMessageType
	if !errors.Is(err, photon.MessageMismatch) || !errors.As(err, &wrong) {
		t.Fatal(err)
	}
	equal(t, "wrong type", *wrong, photon.WrongMessageType{Got: "acme.v1.Invoice", Want: "acme.v1.GetWeather"})
	for _, broken := range []*pb.TypedMessage{nil, {TypeUrl: packed.TypeUrl, Value: []byte{0xff}}} {
		if err := photon.Unpack(broken, unpacked); !errors.Is(err, photon.MessageMismatch) || errors.As(err, &wrong) {
			t.Error(broken, err)
		}
	}
}

func TestAnOutputIsTheNextTurnAndItsCallsAreAnswered(t *testing.T) {
	f := newFake(t)
	f.features = refusesUnknown
	calls := []photon.ToolCall{{Name: "GetWeather", ArgumentsJSON: `{"city":"Oslo"}`, ID: "abcdef123"}}
	output := photon.Output{Text: "why<call>", Reasoning: "why", ToolCalls: calls}
	chat := append(plainChat, photon.AssistantMessage(output), photon.ToolMessage(calls[0], "rain"))
	if _, err := newClient(t, nil, f).Generate(t.Context(), chat); err != nil {
		t.Fatal(err)
	}
	sent := f.seen()[0].GetChat().Messages[1:]
	want := []*pb.ChatMessage{
		{Role: "assistant", ToolCalls: []*pb.ToolCall{
			{Name: "GetWeather", ArgumentsJson: `{"city":"Oslo"}`, Id: "abcdef123"},
		}},
		{Role: "tool", Name: "GetWeather", ToolCallId: "abcdef123", Content: "rain"},
	}
	for i := range want {
		if !proto.Equal(sent[i], want[i]) {
			t.Errorf("got %v, want %v", sent[i], want[i])
		}
	}
	equal(t, "without parts", photon.AssistantMessage(photon.Output{Text: "hi"}).Content, "hi")
	equal(t, "with parts", photon.AssistantMessage(photon.Output{Text: "why hi", Reasoning: "why", Content: "hi"}).Content, "hi")
}

func TestEveryReasonOfTheAPIHasAConstantOfItsName(t *testing.T) {
	for value, name := range pb.ErrorReason_name {
		if value == 0 {
			continue
		}
		reason := photon.Reason(name[len("ERROR_REASON_"):])
		equal(t, name, reason.Proto(), pb.ErrorReason(value))
		// Known ones are members of a group, whatever the code.
		failed := &photon.Error{Reason: reason}
		if reason != photon.InternalFailure && errors.Is(failed, photon.InternalFailure) {
			t.Error(name, "is not known")
		}
	}
	for _, none := range []photon.Reason{"", "UNSPECIFIED", "TOO_POLITE", photon.Overloaded, photon.Unreachable} {
		equal(t, string(none), none.Proto(), pb.ErrorReason_ERROR_REASON_UNSPECIFIED)
	}
}
