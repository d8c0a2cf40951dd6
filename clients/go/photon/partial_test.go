package photon

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf16"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/photon-grpc/photon-grpc/clients/go/examples/acmev1"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

var wholes = []proto.Message{
	&acmev1.Invoice{
		Number: "Rechnung \"17\" \\ Zürich 😀 \u2028 \n",
		Issued: &timestamppb.Timestamp{Seconds: 1714694400},
		Items:  []*acmev1.Invoice_Item{{Name: "chair", Quantity: 2, Cents: 4990}, {}, {Name: "table", Cents: -9007199254740993}},
		Labels: map[string]string{"a]}": "b{[", "": ","},
	},
	&acmev1.GetWeather{City: "Oslo", Unit: acmev1.GetWeather_UNIT_CELSIUS, Days: []string{"Monday", "", "Friday, \\u0020"}},
	&pb.SamplingParams{Temperature: proto.Float32(0.5), LogitBias: map[uint32]float32{1: 2.5, 7: -1}, Seed: proto.Uint64(1 << 63)},
	&acmev1.Invoice{},
}

// Each beginning of a message's JSON is a message whose values are the whole one's, but for the string, list or map that
// is growing; and none is less than the one before it.
func TestEveryBeginningOfAMessageIsAMessage(t *testing.T) {
	for _, want := range wholes {
		for _, text := range []string{protojson.Format(want), escaped(protojson.Format(want))} {
			last := proto.Clone(want)
			proto.Reset(last)
			for n := range len(text) + 1 {
				if !utf8.ValidString(text[:n]) {
					continue
				}
				got := want.ProtoReflect().New().Interface()
				known := partialJSON(text[:n], want.ProtoReflect().Descriptor())
				if err := protojson.Unmarshal([]byte(known), got); err != nil {
					t.Fatalf("%q gives %s: %v", text[:n], known, err)
				}
				if !begins(got.ProtoReflect(), want.ProtoReflect()) {
					t.Fatalf("%q gives %s", text[:n], known)
				}
				if !begins(last.ProtoReflect(), got.ProtoReflect()) {
					t.Fatalf("%q took away: %s", text[:n], known)
				}
				last = got
			}
			if !proto.Equal(last, want) {
				t.Fatalf("the whole of %s is %s", text, protojson.Format(last))
			}
		}
	}
}

func TestAMapThatHasAKeyTwiceKeepsItsLastValue(t *testing.T) {
	const text = `{"logitBias":{"5":1,"7":0.5,"5":2},"seed":"9223372036854775809"}`
	want := &pb.SamplingParams{LogitBias: map[uint32]float32{5: 2, 7: 0.5}, Seed: proto.Uint64(1<<63 + 1)}
	call := ToolCall{Name: "SamplingParams", ArgumentsJSON: text}
	if got, err := ToolCallAs[*pb.SamplingParams](call); err != nil || !proto.Equal(got, want) {
		t.Errorf("the call is %v, %v", got, err)
	}
	for n := range len(text) {
		got := &pb.SamplingParams{}
		known := partialJSON(text[:n], got.ProtoReflect().Descriptor())
		if err := partialMessages.Unmarshal(lastKeyWins(known), got); err != nil {
			t.Errorf("%q: %v", text[:n], err)
		}
	}
	for _, wrong := range []string{`{"seed":"9"} 5`, `{"seed"`, "", "[]"} {
		if _, err := ToolCallAs[*pb.SamplingParams](ToolCall{ArgumentsJSON: wrong}); err == nil {
			t.Errorf("%q is read", wrong)
		}
	}
}

func TestAStringGrowsWithItsText(t *testing.T) {
	text := `{"number":"No. 17","items":[{"name":"chair","cents":"49`
	got := partialJSON(text, (&acmev1.Invoice{}).ProtoReflect().Descriptor())
	if got != `{"number":"No. 17","items":[{"name":"chair"}]}` {
		t.Error(got)
	}
	got = partialJSON(text[:14], (&acmev1.Invoice{}).ProtoReflect().Descriptor())
	if got != `{"number":"No."}` {
		t.Error(got)
	}
}

func begins(part, whole protoreflect.Message) bool {
	isBeginning := true
	part.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		other := whole.Get(field)
		switch {
		case field.IsMap():
			value.Map().Range(func(key protoreflect.MapKey, each protoreflect.Value) bool {
				isBeginning = isBeginning && other.Map().Has(key) && beginsValue(field.MapValue(), each, other.Map().Get(key))
				return isBeginning
			})
		case field.IsList():
			isBeginning = isBeginning && value.List().Len() <= other.List().Len()
			for i := 0; isBeginning && i < value.List().Len(); i++ {
				isBeginning = beginsValue(field, value.List().Get(i), other.List().Get(i))
			}
		default:
			isBeginning = isBeginning && beginsValue(field, value, other)
		}
		return isBeginning
	})
	return isBeginning
}

func beginsValue(field protoreflect.FieldDescriptor, part, whole protoreflect.Value) bool {
	switch {
	case field.Message() != nil:
		return begins(part.Message(), whole.Message())
	case field.Kind() == protoreflect.StringKind:
		return strings.HasPrefix(whole.String(), part.String())
	}
	return part.Equal(whole)
}

// escaped is the JSON text in ASCII.
func escaped(text string) string {
	var out strings.Builder
	for _, unit := range utf16.Encode([]rune(text)) {
		if unit < 0x80 {
			out.WriteByte(byte(unit))
		} else {
			fmt.Fprintf(&out, "\\u%04x", unit)
		}
	}
	return out.String()
}

func TestALongStringIsParsedAsItGrowsByAShare(t *testing.T) {
	const piece, length = "some text", 90_000
	parsed, times, late := 0, 0, 0
	for grown := len(piece); grown <= length; grown += len(piece) {
		if isWorthParsing(piece, grown, parsed) {
			parsed = grown
			times++
		}
		late = max(late, (grown-parsed)*16-grown)
	}
	if times > 200 || late > 0 {
		t.Errorf("parsed %d times, a sixteenth late by %d", times, late)
	}
	if !isWorthParsing(`",`, length+2, length) {
		t.Error("the end of a string is not parsed at once")
	}
}
