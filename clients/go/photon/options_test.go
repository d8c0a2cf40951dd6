package photon

import (
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/photon-grpc/photon-grpc/clients/go/examples/acmev1"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// Fields of a request by their paths, and the option that sets each.
var optionOf = map[string]Option{
	"request_id":                    WithRequestID("a"),
	"model":                         WithModel("m"),
	"continue_from":                 WithContinueFrom([]uint32{1}),
	"parse_special_tokens":          WithParseSpecialTokens(true),
	"sampling.temperature":          WithTemperature(0),
	"sampling.top_p":                WithTopP(0.5),
	"sampling.top_k":                WithTopK(-1),
	"sampling.min_p":                WithMinP(0.1),
	"sampling.repetition_penalty":   WithRepetitionPenalty(1.1),
	"sampling.presence_penalty":     WithPresencePenalty(0.1),
	"sampling.frequency_penalty":    WithFrequencyPenalty(0.1),
	"sampling.seed":                 WithSeed(0),
	"sampling.logit_bias":           WithLogitBias(map[uint32]float32{1: 1}),
	"sampling.allowed_token_ids":    WithAllowedTokenIDs(nil),
	"sampling.num_outputs":          WithNumOutputs(2),
	"stop.max_tokens":               WithMaxTokens(1),
	"stop.min_tokens":               WithMinTokens(0),
	"stop.stop_strings":             WithStopStrings("a", "b"),
	"stop.stop_token_ids":           WithStopTokenIDs(1, 2),
	"stop.ignore_eos":               WithIgnoreEOS(true),
	"stop.include_stop_in_text":     WithIncludeStopInText(true),
	"stop.max_duration":             WithMaxDuration(time.Second),
	"structured_output.json_schema": WithJSONSchema(map[string]any{"type": "object"}),
	"structured_output.json_object": WithJSONObject(),
	"structured_output.regex":       WithRegex("a"),
	"structured_output.choices":     WithChoices("a"),
	"structured_output.grammar":     WithGrammar("start: \"a\""),
	"structured_output.protobuf":    WithMessageType((*acmev1.Invoice)(nil)),
	"output.text":                   WithText(false),
	"output.token_ids":              WithTokenIDs(true),
	"output.prompt_token_ids":       WithPromptTokenIDs(true),
	"output.logprobs":               WithLogprobs(0),
	"output.prompt_logprobs":        WithPromptLogprobs(0),
	"output.score_token_ids":        WithScoreTokenIDs([]uint32{1}),
	"output.skip_special_tokens":    WithSkipSpecialTokens(false),
	"cache.session_id":              WithSessionID("s"),
	"cache.salt":                    WithSalt("s"),
	"cache.bypass_prefix_cache":     WithBypassPrefixCache(true),
	"scheduling.priority":           WithPriority(-1),
	"scheduling.max_queue_duration": WithMaxQueueDuration(time.Second),
	"scheduling.speculation":        WithSpeculation(3),
	"scheduling.timeout":            WithTimeout(time.Second),
	"stream.min_interval":           WithMinInterval(time.Second),
	"stream.max_tokens_per_message": WithMaxTokensPerMessage(8),
	"stream.continuous_usage":       WithContinuousUsage(true),
	"stream.heartbeat_interval":     WithHeartbeatInterval(time.Second),
	"labels":                        WithLabels(map[string]string{"team": "search"}),
	"chat.template_args_json":       WithTemplateArgsJSON(map[string]any{"a": 1}),
	"chat.tools_json":               WithToolsJSON("[]"),
	"chat.tools":                    WithTools(ToolOf((*acmev1.GetWeather)(nil), "weather")),
	"chat.tool_choice":              WithToolChoice("required"),
	"chat.add_generation_prompt":    WithAddGenerationPrompt(false),
}

// What prompts set.
var promptFields = map[string]bool{"text": true, "token_ids": true, "chat.messages": true}

func TestAnOptionSetsItsFieldAndNoOther(t *testing.T) {
	for path, option := range optionOf {
		r, err := newRequest(Chat{{Role: "user", Content: "x"}}, []Option{option})
		if err != nil {
			t.Fatal(path, err)
		}
		for other := range optionOf {
			if isSet := has(r.message.ProtoReflect(), other); isSet != (other == path) {
				t.Errorf("the option of %s: %s is set: %t", path, other, isSet)
			}
		}
	}
}

func TestAToolChoiceIsAWordOrAName(t *testing.T) {
	for choice, want := range map[string]*pb.ToolChoice{
		"auto":     nil,
		"required": {Choice: &pb.ToolChoice_Required_{Required: &pb.ToolChoice_Required{}}},
		"weather":  {Choice: &pb.ToolChoice_Name{Name: "weather"}},
	} {
		r, err := newRequest(Chat{{Role: "user", Content: "x"}}, []Option{WithToolChoice(choice)})
		if err != nil || !proto.Equal(r.message.GetChat().ToolChoice, want) {
			t.Error(choice, r.message, err)
		}
	}
}

func TestEveryFieldOfARequestHasAnOption(t *testing.T) {
	fields := (&pb.GenerateRequest{}).ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		group := field.Message()
		if group == nil || group.Name() == "TokenIds" || field.IsMap() {
			isKnown(t, string(field.Name()))
			continue
		}
		for j := range group.Fields().Len() {
			isKnown(t, string(field.Name()+"."+group.Fields().Get(j).Name()))
		}
	}
}

func isKnown(t *testing.T, path string) {
	t.Helper()
	if optionOf[path] == nil && !promptFields[path] {
		t.Errorf("%s has no option", path)
	}
}

// has reports whether the field at a path is set.
func has(message protoreflect.Message, path string) bool {
	for {
		name, rest, isGroup := strings.Cut(path, ".")
		field := message.Descriptor().Fields().ByName(protoreflect.Name(name))
		if !message.Has(field) {
			return false
		}
		if !isGroup {
			return true
		}
		message, path = message.Get(field).Message(), rest
	}
}

func TestAToolIsDescribedByItsMessage(t *testing.T) {
	r, err := newRequest(Chat{{Role: "user", Content: "x"}}, []Option{WithTools(ToolOf((*acmev1.GetWeather)(nil), "weather"))})
	if err != nil {
		t.Fatal(err)
	}
	want := &pb.Tool{Name: "GetWeather", Description: "weather", ParametersJson: `{"properties":{` +
		`"city":{"type":"string"},"days":{"items":{"type":"string"},"type":"array"},` +
		`"unit":{"enum":["UNIT_UNSPECIFIED","UNIT_CELSIUS","UNIT_FAHRENHEIT"]}},"type":"object"}`}
	if got := r.message.GetChat().Tools; len(got) != 1 || !proto.Equal(got[0], want) {
		t.Error(got)
	}
	call := ToolCall{Name: "GetWeather", ArgumentsJSON: `{"city":"Oslo","unit":"UNIT_CELSIUS","humour":7}`}
	weather, err := ToolCallAs[*acmev1.GetWeather](call)
	if err != nil || weather.City != "Oslo" || weather.Unit != acmev1.GetWeather_UNIT_CELSIUS {
		t.Error(weather, err)
	}
	if _, err := ToolCallAs[*acmev1.GetWeather](ToolCall{ArgumentsJSON: `{"city":7}`}); !errors.Is(err, MessageMismatch) {
		t.Error(err)
	}
}
