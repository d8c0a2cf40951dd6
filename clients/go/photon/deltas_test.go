package photon

import (
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// wholeOutput sets every field of an Output, and one that this client does not know.
func wholeOutput(t *testing.T) *pb.Output {
	t.Helper()
	output := &pb.Output{
		Index: 1, Text: "abc", TokenIds: []uint32{5, 6, 7}, Reasoning: "why", Content: "so",
		Scores:    []*pb.TokenScore{{TokenId: 5}, {TokenId: 6}, {TokenId: 7}},
		ToolCalls: []*pb.ToolCall{{Name: "a", Id: "x"}, {Index: 1, Name: "b", Id: "y"}},
		Finish:    &pb.Finish{Reason: pb.FinishReason_FINISH_REASON_EOS},
		Message:   &pb.TypedMessage{TypeUrl: "type.googleapis.com/acme.v1.Invoice", Value: []byte{1}},
		Usage:     &pb.OutputUsage{OutputTokens: 3},
	}
	output.ProtoReflect().SetUnknown(protowire.AppendString(protowire.AppendTag(nil, 900, protowire.BytesType), "new"))
	fields := output.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if !output.ProtoReflect().Has(fields.Get(i)) {
			t.Fatal("the test sets no ", fields.Get(i).Name())
		}
	}
	return output
}

// A stream that is cut into parts in any way that the options allow joins into the whole.
func TestPartsJoinAsTheOptionsOfTheirFieldsSay(t *testing.T) {
	whole := wholeOutput(t)
	const numParts = 3
	parts := make([]*pb.Output, numParts)
	for i := range parts {
		parts[i] = &pb.Output{}
	}
	whole.ProtoReflect().Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		for i, part := range parts {
			switch delta := proto.GetExtension(field.Options(), pb.E_Delta).(pb.Delta); {
			case delta == pb.Delta_DELTA_KEY, delta == pb.Delta_DELTA_ONCE && i == numParts-1:
				part.ProtoReflect().Set(field, value)
			case delta == pb.Delta_DELTA_APPEND && field.IsList():
				list := part.ProtoReflect().Mutable(field).List()
				for n := i; n < value.List().Len() && (n == i || i == numParts-1); n++ {
					list.Append(value.List().Get(n))
				}
			case delta == pb.Delta_DELTA_APPEND:
				text := value.String()
				part.ProtoReflect().Set(field, protoreflect.ValueOfString(text[len(text)*i/numParts:len(text)*(i+1)/numParts]))
			case delta == pb.Delta_DELTA_UNSPECIFIED:
				t.Errorf("%s does not say how it joins", field.Name())
			}
		}
		return true
	})
	parts[0].ProtoReflect().SetUnknown(whole.ProtoReflect().GetUnknown())
	joined := outputs{}
	for _, part := range parts {
		joined.add(&pb.Output{Index: 0, Text: "of another"})
		joined.add(part)
	}
	if got := joined.inOrder()[1]; !proto.Equal(got, whole) {
		t.Errorf("got %v, want %v", got, whole)
	}
}
