package photon

import (
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Tool is something that a chat's model may ask its reader to call. Its arguments are the fields of a message type, whose
// name is the tool's.
type Tool struct {
	Name        string
	Description string
	arguments   protoreflect.MessageDescriptor
}

// ToolOf describes a tool by the type of its arguments, a generated message, which may be a nil pointer.
func ToolOf(prototype proto.Message, description string) Tool {
	arguments := prototype.ProtoReflect().Descriptor()
	return Tool{string(arguments.Name()), description, arguments}
}

// WithTools offers tools to a chat's model. Calls that it makes come as ToolCalls; ToolCallAs reads them.
func WithTools(tools ...Tool) Option {
	told := make([]map[string]any, len(tools))
	for i, tool := range tools {
		told[i] = map[string]any{
			"type": "function",
			"function": map[string]any{
				"name":        tool.Name,
				"description": tool.Description,
				"parameters":  messageSchema(tool.arguments, nil),
			},
		}
	}
	return WithToolsJSON(told)
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
