package photon

import (
	"encoding/json"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// Tool is something that a chat's model may ask its reader to call.
type Tool struct {
	Name string
	// What it does and when to call it, for the model.
	Description string
	// A JSON Schema of its arguments; empty: it takes none.
	ParametersJSON string
	// With WithToolChoice: whether arguments must validate against the schema; nil: they must.
	Strict *bool
}

// ToolOf describes a tool by the type of its arguments, a generated message, which may be a nil pointer. The type's name is
// the tool's.
func ToolOf(prototype proto.Message, description string) Tool {
	arguments := prototype.ProtoReflect().Descriptor()
	schema, err := json.Marshal(messageSchema(arguments, nil))
	if err != nil {
		panic(err) // Maps, lists and strings are always JSON.
	}
	return Tool{Name: string(arguments.Name()), Description: description, ParametersJSON: string(schema)}
}

// WithTools offers tools to a chat's model. Calls that it makes come as ToolCalls; ToolCallAs reads them.
func WithTools(tools ...Tool) Option {
	return func(r *request) {
		chat := r.chat("tools")
		if chat == nil {
			return
		}
		chat.Tools = nil
		for _, tool := range tools {
			chat.Tools = append(chat.Tools, &pb.Tool{
				Name:           tool.Name,
				Description:    tool.Description,
				ParametersJson: tool.ParametersJSON,
				Strict:         tool.Strict,
			})
		}
	}
}

// AssistantMessage is an output as a turn of the conversation, with the calls that it asks for. Reasoning is left out.
func AssistantMessage(output Output) Message {
	message := Message{Role: "assistant", Content: output.Content, ToolCalls: output.ToolCalls}
	if output.Content == "" && output.Reasoning == "" && len(output.ToolCalls) == 0 {
		// Of a model without parts, the text is the content.
		message.Content = output.Text
	}
	return message
}

// ToolMessage answers a call with what the tool returned.
func ToolMessage(call ToolCall, content string) Message {
	return Message{Role: "tool", Name: call.Name, ToolCallID: call.ID, Content: content}
}

// ToolCallAs reads the arguments of a call as a message of type T. Nothing holds a model to a tool's fields: what T does
// not have is left out, what does not fit is a MessageMismatch.
func ToolCallAs[T proto.Message](call ToolCall) (T, error) {
	message := newMessage[T]()
	options := protojson.UnmarshalOptions{DiscardUnknown: true}
	if err := options.Unmarshal(lastKeyWins(call.ArgumentsJSON), message); err != nil {
		return message, mismatch("arguments of %q: %v", call.Name, err)
	}
	return message, nil
}

type schema = map[string]any

// messageSchema is the JSON Schema of a message's proto3 JSON; a message within itself is any object.
func messageSchema(message protoreflect.MessageDescriptor, within []protoreflect.FullName) schema {
	switch message.FullName() {
	case "google.protobuf.Timestamp":
		return schema{"type": "string", "format": "date-time"}
	case "google.protobuf.Duration", "google.protobuf.FieldMask":
		return schema{"type": "string"}
	case "google.protobuf.Value":
		return schema{}
	case "google.protobuf.ListValue":
		return schema{"type": "array"}
	case "google.protobuf.Struct", "google.protobuf.Any":
		return schema{"type": "object"}
	}
	if message.ParentFile().Path() == "google/protobuf/wrappers.proto" {
		return valueSchema(message.Fields().ByName("value"), nil)
	}
	for _, name := range within {
		if name == message.FullName() {
			return schema{"type": "object"}
		}
	}
	within = append(within[:len(within):len(within)], message.FullName())
	properties := schema{}
	for i := range message.Fields().Len() {
		field := message.Fields().Get(i)
		properties[field.JSONName()] = fieldSchema(field, within)
	}
	return schema{"type": "object", "properties": properties}
}

func fieldSchema(field protoreflect.FieldDescriptor, within []protoreflect.FullName) schema {
	if field.IsMap() {
		return schema{"type": "object", "additionalProperties": valueSchema(field.MapValue(), within)}
	}
	if field.IsList() {
		return schema{"type": "array", "items": valueSchema(field, within)}
	}
	return valueSchema(field, within)
}

func valueSchema(field protoreflect.FieldDescriptor, within []protoreflect.FullName) schema {
	switch field.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return messageSchema(field.Message(), within)
	case protoreflect.StringKind, protoreflect.BytesKind:
		return schema{"type": "string"}
	case protoreflect.BoolKind:
		return schema{"type": "boolean"}
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		return schema{"type": "number"}
	case protoreflect.EnumKind:
		return schema{"enum": enumNames(field.Enum())}
	}
	return schema{"type": "integer"}
}

func enumNames(enum protoreflect.EnumDescriptor) []string {
	var names []string
	for i := range enum.Values().Len() {
		names = append(names, string(enum.Values().Get(i).Name()))
	}
	return names
}
