package photon

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// joinOf says how the parts of each field of an Output join: the option `delta` of the proto, read once.
var joinOf = readJoins((&pb.Output{}).ProtoReflect().Descriptor())

type joinedField struct {
	field protoreflect.FieldDescriptor
	join  func(whole protoreflect.Message, field protoreflect.FieldDescriptor, part protoreflect.Value)
}

func readJoins(message protoreflect.MessageDescriptor) []joinedField {
	var joined []joinedField
	for i := range message.Fields().Len() {
		field := message.Fields().Get(i)
		switch delta := proto.GetExtension(field.Options(), pb.E_Delta).(pb.Delta); {
		case delta == pb.Delta_DELTA_APPEND && field.IsList():
			joined = append(joined, joinedField{field, appendList})
		case delta == pb.Delta_DELTA_APPEND:
			joined = append(joined, joinedField{field, appendText})
		case delta != pb.Delta_DELTA_UNSPECIFIED:
			joined = append(joined, joinedField{field, protoreflect.Message.Set})
		}
	}
	return joined
}

func appendList(whole protoreflect.Message, field protoreflect.FieldDescriptor, part protoreflect.Value) {
	list := whole.Mutable(field).List()
	for i := range part.List().Len() {
		list.Append(part.List().Get(i))
	}
}

func appendText(whole protoreflect.Message, field protoreflect.FieldDescriptor, part protoreflect.Value) {
	whole.Set(field, protoreflect.ValueOfString(whole.Get(field).String()+part.String()))
}

// join adds a part of an output to what came of it before. Fields of a newer server are kept as they came.
func join(whole, part *pb.Output) {
	to, from := whole.ProtoReflect(), part.ProtoReflect()
	for _, each := range joinOf {
		if from.Has(each.field) {
			each.join(to, each.field, from.Get(each.field))
		}
	}
	if unknown := from.GetUnknown(); len(unknown) > 0 {
		to.SetUnknown(append(to.GetUnknown(), unknown...))
	}
}

// outputs are those of a stream as far as they came, by index.
type outputs map[uint32]*pb.Output

func (o outputs) add(delta *pb.Output) {
	if o[delta.Index] == nil {
		o[delta.Index] = &pb.Output{}
	}
	join(o[delta.Index], delta)
}

func (o outputs) inOrder() []*pb.Output {
	ordered := make([]*pb.Output, 0, len(o))
	for _, index := range slices.Sorted(maps.Keys(o)) {
		ordered = append(ordered, o[index])
	}
	return ordered
}

// isHeartbeat reports whether a message has only a sequence, or only what this client does not know.
func isHeartbeat(message *pb.StreamGenerateResponse) bool {
	return message.Start == nil && len(message.Deltas) == 0 && message.Usage == nil && message.Timing == nil
}
