// Parses recorded answers with Go's protobuf, strictly, and prints how many of them it accepts.
//
//	go run . SET ANSWERS
//
// SET is a FileDescriptorSet, and each line of ANSWERS is a message type and a message in base64.
package main

import (
	"bufio"
	"encoding/base64"
	"fmt"
	"log"
	"os"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	// The files of protobuf, which a set may leave out.
	_ "google.golang.org/protobuf/types/known/anypb"
	_ "google.golang.org/protobuf/types/known/durationpb"
	_ "google.golang.org/protobuf/types/known/emptypb"
	_ "google.golang.org/protobuf/types/known/fieldmaskpb"
	_ "google.golang.org/protobuf/types/known/structpb"
	_ "google.golang.org/protobuf/types/known/timestamppb"
	_ "google.golang.org/protobuf/types/known/wrapperspb"
)

func main() {
	files := filesOf(os.Args[1])
	answers, err := os.Open(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	lines := bufio.NewScanner(answers)
	lines.Buffer(nil, 1<<26)
	count := 0
	for lines.Scan() {
		name, text, _ := strings.Cut(lines.Text(), " ")
		if err := parse(files, name, text); err != nil {
			log.Fatalf("%s: %v: %s", name, err, text)
		}
		count++
	}
	fmt.Println(count)
}

func filesOf(path string) *protoregistry.Files {
	data, err := os.ReadFile(path)
	if err != nil {
		log.Fatal(err)
	}
	set := &descriptorpb.FileDescriptorSet{}
	if err := proto.Unmarshal(data, set); err != nil {
		log.Fatal(err)
	}
	files, err := protodesc.NewFiles(set)
	if err != nil {
		log.Fatal(err)
	}
	return files
}

func parse(files *protoregistry.Files, name, text string) error {
	descriptor, err := files.FindDescriptorByName(protoreflect.FullName(name))
	if err != nil { // Empty and the like, where the set has no file of it
		descriptor, err = protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
	}
	if err != nil {
		return err
	}
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return err
	}
	message := dynamicpb.NewMessage(descriptor.(protoreflect.MessageDescriptor))
	if err := proto.Unmarshal(data, message); err != nil {
		return err
	}
	if err := known(message); err != nil {
		return err
	}
	// Its JSON has checks that the wire has not: times, durations, masks, UTF-8.
	_, err = protojson.Marshal(message)
	return err
}

// known reports the first unknown field or number of an enum.
func known(message protoreflect.Message) error {
	if len(message.GetUnknown()) > 0 {
		return fmt.Errorf("unknown fields of %s", message.Descriptor().FullName())
	}
	var found error
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap():
			value.Map().Range(func(_ protoreflect.MapKey, each protoreflect.Value) bool {
				found = knownValue(field.MapValue(), each)
				return found == nil
			})
		case field.IsList():
			for i := 0; i < value.List().Len() && found == nil; i++ {
				found = knownValue(field, value.List().Get(i))
			}
		default:
			found = knownValue(field, value)
		}
		return found == nil
	})
	return found
}

func knownValue(field protoreflect.FieldDescriptor, value protoreflect.Value) error {
	if field.Message() != nil {
		return known(value.Message())
	}
	if enum := field.Enum(); enum != nil && enum.Values().ByNumber(value.Enum()) == nil {
		return fmt.Errorf("%s has no value %d", enum.FullName(), value.Enum())
	}
	return nil
}
