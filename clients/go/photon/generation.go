package photon

import (
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// Output is one output; in a stream (Delta), what is new of it.
type Output struct {
	Index int
	Text  string
	// Only with WithTokenIDs.
	TokenIDs []uint32
	// One for each token, with WithLogprobs or WithScoreTokenIDs.
	Scores []TokenScore
	// Why it ended; nil in a Delta that is not its last.
	Finish *Finish
	// Of a chat, where the model's features have REASONING or TOOL_CALLS: the parts of the text.
	Reasoning, Content string
	// Complete ones, with tools.
	ToolCalls []ToolCall
	// Of typed output, where it is complete; see GenerateAs and Unpack.
	Message *pb.TypedMessage
	// With its last part.
	Usage *OutputUsage
}

// Delta is what is new of one output. The joined texts of an index are its whole text.
type Delta = Output

// Generation is the whole result of a call. The embedded Output is the first of Outputs; Usage counts all of them.
type Generation struct {
	Output
	Outputs []Output
	Start
	Usage  Usage
	Timing Timing
	// Of a stream that was resumed: see Stream.IsBitExact.
	IsBitExact bool
}

// Start is known with the first token.
type Start struct {
	RequestID string
	Model     string
	// Also when the server drew it.
	Seed uint64
	// When the request arrived.
	CreateTime time.Time
	// The server's, for example "0.1.0".
	Release string
	// Model.numerics_version of the server; empty from an older one. Equal ones give equal bits where docs/numerics.md
	// promises it.
	NumericsVersion string
	// With WithPromptTokenIDs and WithPromptLogprobs.
	PromptTokenIDs []uint32
	PromptScores   []TokenScore
}

// FinishReason says why an output ended: a name of the proto's enum without its prefix. Failures are errors.
type FinishReason string

const (
	FinishEOS                FinishReason = "EOS"
	FinishStopString         FinishReason = "STOP_STRING"
	FinishStopToken          FinishReason = "STOP_TOKEN"
	FinishMaxTokens          FinishReason = "MAX_TOKENS"
	FinishContextLength      FinishReason = "CONTEXT_LENGTH"
	FinishTimeLimit          FinishReason = "TIME_LIMIT"
	FinishConstraintComplete FinishReason = "CONSTRAINT_COMPLETE"
	FinishAborted            FinishReason = "ABORTED"
)

// Finish says why an output ended and what was met.
type Finish struct {
	Reason FinishReason
	// Of STOP_STRING.
	StopString string
	// Of EOS and STOP_TOKEN.
	TokenID uint32
}

// TokenScore says how likely the model held one token.
type TokenScore struct {
	Candidate
	// The most likely, best first, then those of WithScoreTokenIDs.
	Candidates []Candidate
}

// Candidate is a token that could have stood there.
type Candidate struct {
	TokenID uint32
	// Natural logarithm of its probability.
	Logprob float32
	// Its place among all tokens; 1 is the most likely. 0: the first token of a prompt, which has no Logprob.
	Rank int
	// Perhaps part of a character; empty without a tokenizer.
	Bytes []byte
}

// ToolCall is a call that an output asks its reader to make; see ToolCallAs.
type ToolCall struct {
	// 0, 1, ... in its output.
	Index int
	Name  string
	// A JSON object, as the model wrote it.
	ArgumentsJSON string
	// Names the call for the message that answers it; a resumed stream has the same.
	ID string
}

// Usage is what is billed.
type Usage struct {
	PromptTokens, CachedPromptTokens int
	OutputTokens                     int
	DraftTokens, AcceptedDraftTokens int
}

// OutputUsage counts the tokens of one output.
type OutputUsage struct {
	OutputTokens                     int
	DraftTokens, AcceptedDraftTokens int
}

// Timing says where the time went, on the server's clock, from arrival.
type Timing struct {
	Queue, FirstToken, Total time.Duration
	PreemptionCount          int
}

func readOutput(message *pb.Output) Output {
	return Output{
		Index:     int(message.Index),
		Text:      message.Text,
		TokenIDs:  message.TokenIds,
		Scores:    readScores(message.Scores),
		Finish:    readFinish(message.Finish),
		Reasoning: message.Reasoning,
		Content:   message.Content,
		ToolCalls: readToolCalls(message.ToolCalls),
		Message:   message.Message,
		Usage:     readOutputUsage(message.Usage),
	}
}

func readGeneration(message *pb.GenerateResponse) *Generation {
	start := Start{
		RequestID:       message.RequestId,
		Model:           message.Model,
		Seed:            message.Seed,
		CreateTime:      readTime(message.CreateTime),
		Release:         message.Release,
		NumericsVersion: message.NumericsVersion,
		PromptTokenIDs:  message.Prompt.GetTokenIds(),
		PromptScores:    readScores(message.Prompt.GetScores()),
	}
	return newGeneration(start, message.Outputs, readUsage(message.Usage), readTiming(message.Timing))
}

func newGeneration(start Start, outputs []*pb.Output, usage Usage, timing Timing) *Generation {
	result := &Generation{Start: start, Usage: usage, Timing: timing, IsBitExact: true}
	for _, output := range outputs {
		result.Outputs = append(result.Outputs, readOutput(output))
	}
	if len(result.Outputs) > 0 {
		result.Output = result.Outputs[0]
	}
	return result
}

func readStart(message *pb.GenerationStart) *Start {
	return &Start{
		RequestID:       message.RequestId,
		Model:           message.Model,
		Seed:            message.Seed,
		CreateTime:      readTime(message.CreateTime),
		Release:         message.Release,
		NumericsVersion: message.NumericsVersion,
		PromptTokenIDs:  message.Prompt.GetTokenIds(),
		PromptScores:    readScores(message.Prompt.GetScores()),
	}
}

func readScores(messages []*pb.TokenScore) []TokenScore {
	if len(messages) == 0 {
		return nil
	}
	scores := make([]TokenScore, len(messages))
	for i, message := range messages {
		scores[i].Candidate = Candidate{message.TokenId, message.GetLogprob(), int(message.Rank), message.TokenBytes}
		for _, other := range message.Candidates {
			candidate := Candidate{other.TokenId, other.Logprob, int(other.Rank), other.TokenBytes}
			scores[i].Candidates = append(scores[i].Candidates, candidate)
		}
	}
	return scores
}

func readToolCalls(messages []*pb.ToolCall) []ToolCall {
	var calls []ToolCall
	for _, message := range messages {
		calls = append(calls, ToolCall{int(message.Index), message.Name, message.ArgumentsJson, message.Id})
	}
	return calls
}

func readFinish(message *pb.Finish) *Finish {
	if message == nil {
		return nil
	}
	finish := &Finish{Reason: readReason(message.Reason), StopString: message.GetStopString()}
	switch matched := message.Matched.(type) {
	case *pb.Finish_StopTokenId:
		finish.TokenID = matched.StopTokenId
	case *pb.Finish_EosTokenId:
		finish.TokenID = matched.EosTokenId
	}
	return finish
}

// readReason gives the number of a reason that a newer server added.
func readReason(reason pb.FinishReason) FinishReason {
	if name, known := pb.FinishReason_name[int32(reason)]; known {
		return FinishReason(strings.TrimPrefix(name, "FINISH_REASON_"))
	}
	return FinishReason(strconv.Itoa(int(reason)))
}

func readUsage(message *pb.Usage) Usage {
	return Usage{
		PromptTokens:        int(message.GetPromptTokens()),
		CachedPromptTokens:  int(message.GetCachedPromptTokens()),
		OutputTokens:        int(message.GetOutputTokens()),
		DraftTokens:         int(message.GetDraftTokens()),
		AcceptedDraftTokens: int(message.GetAcceptedDraftTokens()),
	}
}

func readOutputUsage(message *pb.OutputUsage) *OutputUsage {
	if message == nil {
		return nil
	}
	return &OutputUsage{int(message.OutputTokens), int(message.DraftTokens), int(message.AcceptedDraftTokens)}
}

// readTime gives the zero time of a server that does not say.
func readTime(message *timestamppb.Timestamp) time.Time {
	if message == nil {
		return time.Time{}
	}
	return message.AsTime()
}

func readTiming(message *pb.Timing) Timing {
	return Timing{
		Queue:           message.GetQueueDuration().AsDuration(),
		FirstToken:      message.GetFirstTokenDuration().AsDuration(),
		Total:           message.GetTotalDuration().AsDuration(),
		PreemptionCount: int(message.GetPreemptionCount()),
	}
}
