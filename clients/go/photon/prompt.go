package photon

import (
	"encoding/json"

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
	Role    string
	Content string
	// Who spoke, or the tool that answers.
	Name string
	// The call that a tool message answers.
	ToolCallID string
	// Of an assistant message: what it asked for.
	ToolCalls []ToolCall
}

func (t Text) write(r *request) { r.message.Input = &pb.GenerateRequest_Text{Text: string(t)} }

func (t TokenIDs) write(r *request) {
	r.message.Input = &pb.GenerateRequest_TokenIds{TokenIds: &pb.TokenIds{Ids: t}}
}

func (c Chat) write(r *request) {
	chat := &pb.ChatInput{}
	for _, message := range c {
		chat.Messages = append(chat.Messages, &pb.ChatMessage{
			Role:          message.Role,
			Content:       message.Content,
			Name:          message.Name,
			ToolCallId:    message.ToolCallID,
			ToolCallsJson: r.toolCallsJSON(message.ToolCalls),
		})
	}
	r.message.Input = &pb.GenerateRequest_Chat{Chat: chat}
}

type templateCall struct {
	Type     string `json:"type"`
	Function struct {
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"`
	} `json:"function"`
}

// toolCallsJSON is what chat templates iterate over.
func (r *request) toolCallsJSON(calls []ToolCall) string {
	if len(calls) == 0 {
		return ""
	}
	told := make([]templateCall, len(calls))
	for i, call := range calls {
		told[i].Type = "function"
		told[i].Function.Name = call.Name
		told[i].Function.Arguments = json.RawMessage(call.ArgumentsJSON)
	}
	text, err := json.Marshal(told)
	if err != nil {
		r.refuse("chat.messages.tool_calls_json", "arguments of a tool call are no JSON: %v", err)
	}
	return string(text)
}
