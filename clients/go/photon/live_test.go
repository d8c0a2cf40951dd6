package photon_test

import (
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/photon-grpc/photon-grpc/clients/go/examples/acmev1"
	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// live is a client of the server at TEST_TARGET, with the embedded model.
func live(t *testing.T) *photon.Client {
	t.Helper()
	target := os.Getenv("TEST_TARGET")
	if target == "" {
		t.Skip("TEST_TARGET names no server")
	}
	return connect(t, target)
}

var greedy = []photon.Option{photon.WithMaxTokens(24), photon.WithTemperature(0), photon.WithIgnoreEOS(true)}

func TestLiveJoinedDeltasAreTheWhole(t *testing.T) {
	client := live(t)
	many := client.Multiplex(t.Context())
	defer many.Close()
	options := append(greedy, photon.WithTokenIDs(true), photon.WithLogprobs(2), photon.WithPromptLogprobs(0))
	whole, err := client.Generate(t.Context(), photon.Text("def fib(n):"), options...)
	if err != nil {
		t.Fatal(err)
	}
	for _, caller := range []photon.Caller{client, many} {
		joined, err := caller.Stream(t.Context(), photon.Text("def fib(n):"), options...).Collect()
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "text", joined.Text, whole.Text)
		equal(t, "ids", slices.Equal(joined.TokenIDs, whole.TokenIDs), true)
		equal(t, "scores", len(joined.Scores), 24)
		equal(t, "of the prompt", len(joined.PromptScores), len(whole.PromptScores))
		equal(t, "usage", joined.Usage.OutputTokens, 24)
		if joined.Timing.Total < joined.Timing.FirstToken || joined.Timing.FirstToken <= 0 {
			t.Error(joined.Timing)
		}
	}
}

func TestLiveScores(t *testing.T) {
	result, err := live(t).Generate(t.Context(), photon.Text("import os"), append(greedy, photon.WithLogprobs(3), photon.WithScoreTokenIDs([]uint32{7}))...)
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, score := range result.Scores {
		equal(t, "greedy takes the best", score.TokenID, score.Candidates[0].TokenID)
		equal(t, "rank", score.Rank, 1)
		equal(t, "candidates", len(score.Candidates), 4)
		if score.Logprob > 0 || score.Candidates[1].Logprob > score.Logprob || math.IsNaN(float64(score.Logprob)) {
			t.Error(score)
		}
		text.Write(score.Bytes)
	}
	equal(t, "bytes", text.String(), result.Text)
}

func TestLiveModelsAndTokenizer(t *testing.T) {
	client := live(t)
	models, err := client.Models(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	model, err := client.Model(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "the default is the first", proto.Equal(models[0], model), true)
	ids, err := client.Tokenize(t.Context(), photon.Text("import os"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := client.Detokenize(t.Context(), ids)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "there and back", text, "import os")
	chat := photon.Chat{{Role: "user", Content: "import os"}}
	inChat, err := client.Tokenize(t.Context(), chat)
	if err != nil || len(inChat) <= len(ids) {
		t.Error(inChat, err)
	}
	byText, err := client.Generate(t.Context(), photon.Text("import os"), greedy...)
	if err != nil {
		t.Fatal(err)
	}
	byIDs, err := client.Generate(t.Context(), photon.TokenIDs(ids), greedy...)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "by text and by ids", byIDs.Text, byText.Text)
}

func TestLiveRefusals(t *testing.T) {
	client := live(t)
	model, err := client.Model(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	context := int(model.MaxContextTokens)
	_, err = client.Generate(t.Context(), photon.Text("x"), photon.WithMaxTokens(context+1))
	var failed *photon.Error
	if !errors.As(err, &failed) || !errors.Is(err, photon.PromptTooLong) {
		t.Fatal(err)
	}
	equal(t, "limit", failed.Limit, int64(context))
	if failed.Needed <= failed.Limit {
		t.Error(failed.Needed)
	}
	_, err = client.Generate(t.Context(), photon.Text("x"), photon.WithTopP(0))
	if !errors.As(err, &failed) || !errors.Is(err, photon.InvalidRequest) || failed.Violations[0].Field != "sampling.top_p" {
		t.Error(err)
	}
	if _, err = client.Model(t.Context(), "no-such-model"); !errors.Is(err, photon.ModelNotFound) {
		t.Error(err)
	}
}

func TestLiveMessages(t *testing.T) {
	client := live(t)
	many := client.Multiplex(t.Context())
	defer many.Close()
	prompt := photon.Text("invoice = ")
	numFilled := 0
	for seed := range uint64(8) {
		options := []photon.Option{photon.WithSeed(seed), photon.WithTemperature(1), photon.WithMaxTokens(200)}
		whole, err := photon.GenerateAs[*acmev1.Invoice](t.Context(), client, prompt, options...)
		if errors.Is(err, photon.MessageMismatch) && strings.Contains(err.Error(), "MAX_TOKENS") {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if proto.Size(whole) > 0 {
			numFilled++
		}
		last := &acmev1.Invoice{}
		for partial, err := range photon.StreamAs[*acmev1.Invoice](t.Context(), many, prompt, options...) {
			if err != nil {
				t.Fatal(err)
			}
			if proto.Size(partial) < proto.Size(last) {
				t.Errorf("%v became %v", last, partial)
			}
			last = partial
		}
		if !proto.Equal(last, whole) {
			t.Errorf("streamed %v, whole %v", last, whole)
		}
	}
	if numFilled == 0 {
		t.Error("every message was empty")
	}
}

// The second request has a digest in place of the type's descriptors, if the server knows digests.
func TestLiveALargeTypeTwice(t *testing.T) {
	client, large := live(t), withLargeType(t)
	var texts []string
	for range 2 {
		result, err := client.Generate(t.Context(), photon.Text("x = "), large, photon.WithMaxTokens(8), photon.WithSeed(1))
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, result.Text)
	}
	equal(t, "text", texts[1], texts[0])
}

func TestLiveToolsAreRendered(t *testing.T) {
	client := live(t)
	chat := photon.Chat{
		{Role: "user", Content: "weather?"},
		{Role: "assistant", ToolCalls: []photon.ToolCall{{Name: "GetWeather", ArgumentsJSON: `{"city":"Oslo"}`, ID: "1"}}},
		{Role: "tool", Content: "rain", ToolCallID: "1"},
	}
	tools := photon.WithTools(photon.ToolOf((*acmev1.GetWeather)(nil), "The weather of a city"))
	model, err := client.Model(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.Generate(t.Context(), chat, tools, photon.WithMaxTokens(8))
	if isOld := !slices.Contains(model.Features, pb.Feature_FEATURE_UNKNOWN_FIELDS_REFUSED); isOld {
		if !errors.Is(err, photon.FeatureNotSupported) {
			t.Error(err)
		}
		_, err = client.Generate(t.Context(), chat[:1], photon.WithToolsJSON(`[{"name": "weather"}]`), photon.WithMaxTokens(8))
	}
	if err != nil {
		t.Error(err)
	}
}

func TestLiveConstraints(t *testing.T) {
	client := live(t)
	result, err := client.Generate(t.Context(), photon.Text("Prime: "), photon.WithChoices("4", "7"))
	if err != nil || result.Text != "4" && result.Text != "7" {
		t.Error(result, err)
	}
	equal(t, "finish", result.Finish.Reason, photon.FinishConstraintComplete)
	result, err = client.Generate(t.Context(), photon.Text("Prime: "), photon.WithRegex("[0-9]{3}"))
	if err != nil || len(result.Text) != 3 {
		t.Error(result, err)
	}
}
