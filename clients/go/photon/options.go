package photon

import (
	"encoding/json"
	"math"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// Option sets a field of a request. Options are named like the fields of the proto, wherever they stand in it; what is
// not set is the model's own default. docs/api.md says what each means.
type Option func(*request)

// request is a GenerateRequest that is being put together, and what its call is to do beside it.
type request struct {
	message *pb.GenerateRequest
	timeout time.Duration
	hedge   *time.Duration
	// The first mistake.
	err *Error
}

func newRequest(prompt Prompt, options []Option) (*request, error) {
	r := &request{message: &pb.GenerateRequest{}}
	if prompt == nil {
		return nil, invalid("input", "there is no prompt")
	}
	prompt.write(r)
	for _, option := range options {
		option(r)
	}
	if r.err != nil {
		return nil, r.err
	}
	return r, nil
}

func (r *request) refuse(field, format string, args ...any) {
	if r.err == nil {
		r.err = invalid(field, format, args...)
	}
}

// WithRequest changes the request itself: for fields that have no option here.
func WithRequest(change func(*pb.GenerateRequest)) Option {
	return func(r *request) { change(r.message) }
}

// WithHedgeAfter sends a second attempt to another replica when Generate has no answer after delay (0: at once). The first
// answer wins, the other attempt is cancelled. Streams are not hedged.
func WithHedgeAfter(delay time.Duration) Option { return func(r *request) { r.hedge = &delay } }

func WithModel(name string) Option { return func(r *request) { r.message.Model = name } }

func WithRequestID(id string) Option { return func(r *request) { r.message.RequestId = id } }

func WithParseSpecialTokens(on bool) Option {
	return func(r *request) { r.message.ParseSpecialTokens = on }
}

func WithContinueFrom(ids []uint32) Option {
	return func(r *request) { r.message.ContinueFrom = &pb.TokenIds{Ids: ids} }
}

// WithLabels notes something beside the request: in the server's request log and spans, and in metrics for the labels that
// its operator allows.
func WithLabels(labels map[string]string) Option {
	return func(r *request) { r.message.Labels = labels }
}

// SamplingParams.

func (r *request) sampling() *pb.SamplingParams { return made(&r.message.Sampling) }

func WithTemperature(value float32) Option {
	return func(r *request) { r.sampling().Temperature = &value }
}

func WithTopP(value float32) Option { return func(r *request) { r.sampling().TopP = &value } }

func WithTopK(value int) Option {
	return func(r *request) {
		if value < math.MinInt32 || value > math.MaxInt32 {
			r.refuse("sampling.top_k", "%d does not fit into 32 bits", value)
		}
		narrow := int32(value)
		r.sampling().TopK = &narrow
	}
}

func WithMinP(value float32) Option { return func(r *request) { r.sampling().MinP = &value } }

func WithRepetitionPenalty(value float32) Option {
	return func(r *request) { r.sampling().RepetitionPenalty = &value }
}

func WithPresencePenalty(value float32) Option {
	return func(r *request) { r.sampling().PresencePenalty = &value }
}

func WithFrequencyPenalty(value float32) Option {
	return func(r *request) { r.sampling().FrequencyPenalty = &value }
}

func WithSeed(value uint64) Option { return func(r *request) { r.sampling().Seed = &value } }

func WithLogitBias(bias map[uint32]float32) Option {
	return func(r *request) { r.sampling().LogitBias = bias }
}

func WithAllowedTokenIDs(ids []uint32) Option {
	return func(r *request) { r.sampling().AllowedTokenIds = &pb.TokenIds{Ids: ids} }
}

func WithNumOutputs(n int) Option {
	return func(r *request) { r.sampling().NumOutputs = r.count("sampling.num_outputs", n) }
}

// StopParams.

func (r *request) stop() *pb.StopParams { return made(&r.message.Stop) }

func WithMaxTokens(n int) Option {
	return func(r *request) { r.stop().MaxTokens = r.count("stop.max_tokens", n) }
}

func WithMinTokens(n int) Option {
	return func(r *request) { r.stop().MinTokens = r.count("stop.min_tokens", n) }
}

func WithStopStrings(strings ...string) Option {
	return func(r *request) { r.stop().StopStrings = strings }
}

func WithStopTokenIDs(ids ...uint32) Option { return func(r *request) { r.stop().StopTokenIds = ids } }

func WithIgnoreEOS(on bool) Option { return func(r *request) { r.stop().IgnoreEos = on } }

func WithIncludeStopInText(on bool) Option {
	return func(r *request) { r.stop().IncludeStopInText = on }
}

func WithMaxDuration(limit time.Duration) Option {
	return func(r *request) { r.stop().MaxDuration = durationpb.New(limit) }
}

// StructuredOutput: one of them. For a message type see GenerateAs.

// WithJSONSchema takes the schema as a JSON text (string or []byte) or as anything that encoding/json makes one of.
func WithJSONSchema(schema any) Option {
	return func(r *request) {
		text := r.json("structured_output.json_schema", schema)
		r.constrain("json_schema", &pb.StructuredOutput{Constraint: &pb.StructuredOutput_JsonSchema{JsonSchema: text}})
	}
}

func WithJSONObject() Option {
	return func(r *request) {
		object := &pb.StructuredOutput_JsonObject{}
		r.constrain("json_object", &pb.StructuredOutput{Constraint: &pb.StructuredOutput_JsonObject_{JsonObject: object}})
	}
}

func WithRegex(pattern string) Option {
	return func(r *request) {
		r.constrain("regex", &pb.StructuredOutput{Constraint: &pb.StructuredOutput_Regex{Regex: pattern}})
	}
}

func WithChoices(values ...string) Option {
	return func(r *request) {
		choices := &pb.StructuredOutput_Choices{Values: values}
		r.constrain("choices", &pb.StructuredOutput{Constraint: &pb.StructuredOutput_Choices_{Choices: choices}})
	}
}

func WithGrammar(grammar string) Option {
	return func(r *request) {
		r.constrain("grammar", &pb.StructuredOutput{Constraint: &pb.StructuredOutput_Grammar{Grammar: grammar}})
	}
}

// OutputOptions: what comes back.

func (r *request) output() *pb.OutputOptions { return made(&r.message.Output) }

func WithText(on bool) Option { return func(r *request) { r.output().Text = &on } }

func WithTokenIDs(on bool) Option { return func(r *request) { r.output().TokenIds = on } }

func WithPromptTokenIDs(on bool) Option { return func(r *request) { r.output().PromptTokenIds = on } }

func WithLogprobs(n int) Option {
	return func(r *request) { r.output().Logprobs = r.count("output.logprobs", n) }
}

func WithPromptLogprobs(n int) Option {
	return func(r *request) { r.output().PromptLogprobs = r.count("output.prompt_logprobs", n) }
}

func WithScoreTokenIDs(ids []uint32) Option {
	return func(r *request) { r.output().ScoreTokenIds = &pb.TokenIds{Ids: ids} }
}

func WithSkipSpecialTokens(on bool) Option {
	return func(r *request) { r.output().SkipSpecialTokens = &on }
}

// CacheOptions.

func (r *request) cache() *pb.CacheOptions { return made(&r.message.Cache) }

func WithSessionID(id string) Option { return func(r *request) { r.cache().SessionId = id } }

func WithSalt(salt string) Option { return func(r *request) { r.cache().Salt = salt } }

func WithBypassPrefixCache(on bool) Option {
	return func(r *request) { r.cache().BypassPrefixCache = on }
}

// SchedulingOptions.

func (r *request) scheduling() *pb.SchedulingOptions { return made(&r.message.Scheduling) }

func WithPriority(value int32) Option { return func(r *request) { r.scheduling().Priority = value } }

func WithMaxQueueDuration(limit time.Duration) Option {
	return func(r *request) { r.scheduling().MaxQueueDuration = durationpb.New(limit) }
}

// WithSpeculation limits the tokens that a step drafts for an output; 0: none. Unset: as many as pay.
func WithSpeculation(most uint32) Option {
	return func(r *request) { r.scheduling().Speculation = &most }
}

// WithTimeout is the deadline of the call, too, where the context's is not earlier.
func WithTimeout(limit time.Duration) Option {
	return func(r *request) {
		r.timeout = limit
		r.scheduling().Timeout = durationpb.New(limit)
	}
}

// StreamOptions.

func (r *request) stream() *pb.StreamOptions { return made(&r.message.Stream) }

func WithMinInterval(interval time.Duration) Option {
	return func(r *request) { r.stream().MinInterval = durationpb.New(interval) }
}

func WithMaxTokensPerMessage(n int) Option {
	return func(r *request) { r.stream().MaxTokensPerMessage = r.count("stream.max_tokens_per_message", n) }
}

func WithContinuousUsage(on bool) Option { return func(r *request) { r.stream().ContinuousUsage = on } }

// WithHeartbeatInterval asks for messages before the first token, for proxies that close an idle stream; nobody sees them.
func WithHeartbeatInterval(interval time.Duration) Option {
	return func(r *request) { r.stream().HeartbeatInterval = durationpb.New(interval) }
}

// ChatInput, beside the messages.

// WithTemplateArgsJSON takes an object as WithJSONSchema takes a schema.
func WithTemplateArgsJSON(args any) Option {
	return func(r *request) {
		if chat := r.chat("template_args_json"); chat != nil {
			chat.TemplateArgsJson = r.json("chat.template_args_json", args)
		}
	}
}

// WithToolsJSON takes an array in the template's own form, as WithJSONSchema takes a schema; in place of WithTools.
func WithToolsJSON(tools any) Option {
	return func(r *request) {
		if chat := r.chat("tools_json"); chat != nil {
			chat.ToolsJson = r.json("chat.tools_json", tools)
		}
	}
}

// WithToolChoice takes "auto" (unset), "required" or the name of the tool that is called.
func WithToolChoice(choice string) Option {
	return func(r *request) {
		chat := r.chat("tool_choice")
		if chat == nil {
			return
		}
		switch choice {
		case "auto":
			chat.ToolChoice = nil
		case "required":
			chat.ToolChoice = &pb.ToolChoice{Choice: &pb.ToolChoice_Required_{Required: &pb.ToolChoice_Required{}}}
		default:
			chat.ToolChoice = &pb.ToolChoice{Choice: &pb.ToolChoice_Name{Name: choice}}
		}
	}
}

func WithAddGenerationPrompt(on bool) Option {
	return func(r *request) {
		if chat := r.chat("add_generation_prompt"); chat != nil {
			chat.AddGenerationPrompt = &on
		}
	}
}

func (r *request) chat(field string) *pb.ChatInput {
	chat := r.message.GetChat()
	if chat == nil {
		r.refuse("chat."+field, "%s needs a chat as the prompt", field)
	}
	return chat
}

// constrain refuses a second constraint: an output has one.
func (r *request) constrain(field string, output *pb.StructuredOutput) {
	if r.message.StructuredOutput != nil {
		r.refuse("structured_output."+field, "another constraint is set, too; an output has one")
	}
	r.message.StructuredOutput = output
}

func (r *request) json(field string, value any) string {
	switch value := value.(type) {
	case string:
		return value
	case []byte:
		return string(value)
	}
	text, err := json.Marshal(value)
	if err != nil {
		r.refuse(field, "is not JSON: %v", err)
	}
	return string(text)
}

func (r *request) count(field string, n int) *uint32 {
	if n < 0 || int64(n) > math.MaxUint32 {
		r.refuse(field, "%d is not within 0 and %d", n, uint32(math.MaxUint32))
	}
	narrow := uint32(n)
	return &narrow
}

// made is the message that field points to, made where there is none.
func made[T any](field **T) *T {
	if *field == nil {
		*field = new(T)
	}
	return *field
}
