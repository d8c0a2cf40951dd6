package photon

import (
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// Prompt is Text, TokenIDs or Chat.
type Prompt interface{ write(*request) }

// Text is encoded as plain text; see WithParseSpecialTokens.
type Text string

// TokenIDs are taken as they are; nothing is added.
type TokenIDs []uint32

// Chat is rendered by the model's own chat template, oldest message first.
type Chat []Message

// Message is one turn of a conversation.
type Message struct {
	// As the template names it: usually "system", "user", "assistant" or "tool".
	Role string
	// Not together with Parts.
	Content string
	Parts   []Part
	// Who spoke, or the tool that answers.
	Name string
	// The call that a tool message answers.
	ToolCallID string
	// Of an assistant message: what it asked for.
	ToolCalls []ToolCall
}

// Part is a part of a message: a TextPart. Texts are joined without a separator.
type Part interface{ write() *pb.ContentPart }

// TextPart is text.
type TextPart string

func (t TextPart) write() *pb.ContentPart {
	return &pb.ContentPart{Part: &pb.ContentPart_Text{Text: string(t)}}
}

func (t Text) write(r *request) { r.message.Input = &pb.GenerateRequest_Text{Text: string(t)} }

func (t TokenIDs) write(r *request) {
	r.message.Input = &pb.GenerateRequest_TokenIds{TokenIds: &pb.TokenIds{Ids: t}}
}

func (c Chat) write(r *request) {
	chat := &pb.ChatInput{}
	for _, message := range c {
		chat.Messages = append(chat.Messages, &pb.ChatMessage{
			Role:       message.Role,
			Content:    message.Content,
			Name:       message.Name,
			ToolCallId: message.ToolCallID,
			ToolCalls:  writeToolCalls(message.ToolCalls),
			Parts:      writeParts(message.Parts),
		})
	}
	r.message.Input = &pb.GenerateRequest_Chat{Chat: chat}
}

func writeToolCalls(calls []ToolCall) []*pb.ToolCall {
	var told []*pb.ToolCall
	for i, call := range calls {
		told = append(told, &pb.ToolCall{
			Index: uint32(i), Name: call.Name, ArgumentsJson: call.ArgumentsJSON, Id: call.ID,
		})
	}
	return told
}

func writeParts(parts []Part) []*pb.ContentPart {
	var told []*pb.ContentPart
	for _, part := range parts {
		told = append(told, part.write())
	}
	return told
}
