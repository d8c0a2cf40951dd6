package photon

import (
	"context"
	"fmt"
	"io"
	"iter"
	"strings"
	"sync"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// Files that the server has.
const wellKnown = "google/protobuf/"

// GenerateAs generates a message of type T, a pointer to a generated struct:
//
//	invoice, err := photon.GenerateAs[*acmev1.Invoice](ctx, client, photon.Text("…"))
//
// An output that a limit cut is a MessageMismatch.
func GenerateAs[T proto.Message](ctx context.Context, caller Caller, prompt Prompt, options ...Option) (T, error) {
	result, err := caller.Generate(ctx, prompt, typed[T](options)...)
	if err != nil {
		var none T
		return none, err
	}
	return MessageAs[T](result.Output)
}

// StreamAs gives the message of a generation as it is filled: values that are whole, strings as far as they are written,
// long ones by shares, each time in a message of its own. The last is the whole one, unless an error stands beside it.
// A key that a map is given twice has its last value.
func StreamAs[T proto.Message](ctx context.Context, caller Caller, prompt Prompt, options ...Option) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var whole pb.Output
		var last string
		var parsed int
		stream := caller.Stream(ctx, prompt, typed[T](options)...)
		defer stream.Close()
		for {
			delta, err := stream.next()
			if err == io.EOF {
				return
			}
			if err != nil {
				var none T
				yield(none, err)
				return
			}
			if delta.Index != 0 {
				continue
			}
			join(&whole, delta)
			if whole.Finish != nil {
				yield(MessageAs[T](readOutput(&whole)))
				return
			}
			if !isWorthParsing(delta.Text, len(whole.Text), parsed) {
				continue
			}
			parsed = len(whole.Text)
			message := newMessage[T]()
			known := partialJSON(whole.Text, message.ProtoReflect().Descriptor())
			if known == last || partialMessages.Unmarshal(lastKeyWins(known), message) != nil {
				continue
			}
			if last = known; !yield(message, nil) {
				return
			}
		}
	}
}

// isWorthParsing says whether a piece may end a value, or the text has grown by a sixteenth since it was parsed: all of it
// is parsed, and of a long string in small pieces each time would take time by the square of its length.
func isWorthParsing(piece string, length, parsed int) bool {
	return strings.Contains(piece, `"`) || length-parsed > parsed/16
}

// MessageAs reads the message of an output that was asked for with WithMessageType.
func MessageAs[T proto.Message](output Output) (T, error) {
	message := newMessage[T]()
	name := message.ProtoReflect().Descriptor().FullName()
	if output.Message == nil {
		reason := FinishReason("nothing")
		if output.Finish != nil {
			reason = output.Finish.Reason
		}
		return message, mismatch("the output ended with %s before its %s was whole", reason, name)
	}
	return message, Unpack(output.Message, message)
}

// WrongMessageType is the cause of the error of Unpack for a message of another type.
type WrongMessageType struct {
	// Full names.
	Got, Want string
}

func (w *WrongMessageType) Error() string {
	return fmt.Sprintf("the message is a %s; %s is wanted", w.Got, w.Want)
}

// Unpack reads the message of an output into one of its type:
//
//	invoice := &acmev1.Invoice{}
//	err := photon.Unpack(output.Message, invoice)
//
// Errors are MessageMismatch; errors.As finds the *WrongMessageType of a message of another type.
func Unpack(message *pb.TypedMessage, into proto.Message) error {
	want := string(into.ProtoReflect().Descriptor().FullName())
	if message == nil {
		return mismatch("the output has no message; %s is wanted", want)
	}
	if got := message.TypeUrl[strings.LastIndexByte(message.TypeUrl, '/')+1:]; got != want {
		wrong := &WrongMessageType{got, want}
		failure := mismatch("%v", wrong)
		failure.cause = wrong
		return failure
	}
	if err := proto.Unmarshal(message.Value, into); err != nil {
		return mismatch("the server's bytes are no %s: %v", want, err)
	}
	return nil
}

// WithMessageType asks for a message of prototype's type, which may be a nil pointer.
func WithMessageType(prototype proto.Message) Option {
	return func(r *request) {
		descriptor := prototype.ProtoReflect().Descriptor()
		files, err := descriptorSet(descriptor.ParentFile())
		if err != nil {
			r.refuse("structured_output.protobuf", "the file of %s: %v", descriptor.FullName(), err)
		}
		wanted := &pb.StructuredOutput_Protobuf{FileDescriptorSet: files, MessageType: string(descriptor.FullName())}
		r.constrain("protobuf", &pb.StructuredOutput{Constraint: &pb.StructuredOutput_Protobuf_{Protobuf: wanted}})
	}
}

var partialMessages = protojson.UnmarshalOptions{AllowPartial: true, DiscardUnknown: true}

func typed[T proto.Message](options []Option) []Option {
	var prototype T
	return append(options[:len(options):len(options)], WithMessageType(prototype))
}

func newMessage[T proto.Message]() T {
	var prototype T
	return prototype.ProtoReflect().New().Interface().(T)
}

const maxDescribed = 64

// described are the sets of files that were asked for.
var described = struct {
	mu   sync.Mutex
	sets map[protoreflect.FileDescriptor][]byte
}{sets: map[protoreflect.FileDescriptor][]byte{}}

// descriptorSet is a file and all that it imports, in bytes. The same file has the same bytes, and so the same digest.
func descriptorSet(file protoreflect.FileDescriptor) ([]byte, error) {
	described.mu.Lock()
	defer described.mu.Unlock()
	if set := described.sets[file]; set != nil {
		return set, nil
	}
	set, err := proto.MarshalOptions{Deterministic: true}.Marshal(fileSet(file))
	if err != nil {
		return nil, err
	}
	if len(described.sets) >= maxDescribed {
		clear(described.sets)
	}
	described.sets[file] = set
	return set, nil
}

// fileSet is first and all that it imports, without what the server has.
func fileSet(first protoreflect.FileDescriptor) *descriptorpb.FileDescriptorSet {
	set := &descriptorpb.FileDescriptorSet{}
	seen := map[string]bool{}
	var add func(protoreflect.FileDescriptor)
	add = func(file protoreflect.FileDescriptor) {
		if seen[file.Path()] || strings.HasPrefix(file.Path(), wellKnown) {
			return
		}
		seen[file.Path()] = true
		set.File = append(set.File, protodesc.ToFileDescriptorProto(file))
		for i := range file.Imports().Len() {
			add(file.Imports().Get(i).FileDescriptor)
		}
	}
	add(first)
	return set
}
