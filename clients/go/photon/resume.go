package photon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

const defaultResumeTimeout = time.Minute

// resumedCall is a call that, cut after output began, goes on elsewhere: the ids that came are sent back as
// continue_from with the seed of the first Start, and the server sends what follows them. Its reader sees one stream,
// with another Start where a continuation is not bit-exact.
type resumedCall struct {
	ctx     context.Context
	open    openFunc
	request *pb.GenerateRequest
	// How long to look for a replica that goes on.
	limit time.Duration
	// Whether the caller wants the ids, which are asked for in any case.
	givesIDs bool

	current call
	// When the first and the current call were opened, and how many ids had come before the current one.
	began, opened time.Time
	numBefore     int
	isResumed     bool

	// Of the first message; nil before it.
	start *pb.GenerationStart
	// Of the replica whose ids came last.
	numerics   string
	ids        []uint32
	firstToken time.Duration
	isOver     bool
}

func newResumedCall(ctx context.Context, open openFunc, request *pb.GenerateRequest, limit time.Duration) *resumedCall {
	givesIDs := request.GetOutput().GetTokenIds()
	made(&request.Output).TokenIds = true
	now := time.Now()
	return &resumedCall{
		ctx: ctx, open: open, request: request, limit: limit, givesIDs: givesIDs,
		current: open(ctx, request), began: now, opened: now,
	}
}

func (r *resumedCall) Recv() (*pb.StreamGenerateResponse, error) {
	message, err := r.current.Recv()
	switch {
	case err == nil:
		return r.take(message), nil
	case r.isOver:
		// Only the status was lost.
		return nil, io.EOF
	case r.start == nil || !errors.Is(err, Unavailable):
		return nil, err
	case r.request.GetSampling().GetNumOutputs() > 1:
		return nil, notResumable(err, r.request.Sampling.GetNumOutputs())
	}
	return r.resume(err)
}

// resume gives the first message of a replica that goes on.
func (r *resumedCall) resume(cut error) (*pb.StreamGenerateResponse, error) {
	lost := time.Now()
	for tries := 0; ; tries++ {
		r.isResumed = true
		r.opened, r.numBefore = time.Now(), len(r.ids)
		r.current = r.open(r.ctx, r.rest())
		message, err := r.current.Recv()
		switch {
		case err == nil:
			return r.take(message), nil
		case errors.Is(err, FeatureNotSupported):
			// The model cannot continue an output; its caller did not ask for that.
			return nil, cut
		case time.Since(lost) > r.limit:
			return nil, err
		}
		again := pause
		if errors.Is(err, DuplicateRequestId) {
			// The server has not noticed yet that the connection of the call before is lost.
			again = backOff
		}
		if err := again(r.ctx, err, tries); err != nil {
			return nil, err
		}
	}
}

// rest asks for what follows the ids that came, under the id that the server reported: ids of tool calls derive from it.
func (r *resumedCall) rest() *pb.GenerateRequest {
	rest := proto.CloneOf(r.request)
	rest.RequestId = r.start.RequestId
	rest.ContinueFrom = &pb.TokenIds{Ids: slices.Concat(r.request.GetContinueFrom().GetIds(), r.ids)}
	made(&rest.Sampling).Seed = &r.start.Seed
	elapsed := r.opened.Sub(r.began)
	if rest.Stop.GetMaxDuration() != nil {
		rest.Stop.MaxDuration = shortened(rest.Stop.MaxDuration, elapsed)
	}
	if rest.Scheduling.GetTimeout() != nil {
		rest.Scheduling.Timeout = shortened(rest.Scheduling.Timeout, elapsed)
	}
	return rest
}

// take turns a message of the current call into one of the whole stream.
func (r *resumedCall) take(message *pb.StreamGenerateResponse) *pb.StreamGenerateResponse {
	if r.start == nil {
		r.start, r.firstToken = message.Start, time.Since(r.began)
		r.numerics = message.GetStart().GetNumericsVersion()
	} else if message.Start != nil {
		r.compare(message)
	}
	for _, delta := range message.Deltas {
		r.ids = append(r.ids, delta.TokenIds...)
		if !r.givesIDs {
			delta.TokenIds = nil
		}
		if delta.Usage != nil {
			delta.Usage.OutputTokens += uint32(r.numBefore)
		}
	}
	if r.isResumed {
		r.account(message.Usage, message.Timing)
	}
	r.isOver = message.Timing != nil
	return message
}

// compare removes the start of a continuation, unless it is not bit-exact.
func (r *resumedCall) compare(message *pb.StreamGenerateResponse) {
	before, after := r.numerics, message.Start.NumericsVersion
	r.numerics = after
	if isBitExact(before, after) {
		message.Start = nil
		return
	}
	slog.WarnContext(r.ctx, "photon: a stream was continued by a server with other numerics: its ids may differ from those of one server",
		"request_id", r.start.RequestId, "before", before, "after", after)
}

// isBitExact compares the numerics versions of an interrupted stream and of its continuation; all clients have this
// rule. An older server sends none, and promises nothing, as a server in the mode "fast".
func isBitExact(before, after string) bool {
	return before == after && after != "" && !strings.HasPrefix(after, "fast-")
}

// account turns what the last call says of itself into what one call would have said: ids that were sent back are
// output, not prompt.
func (r *resumedCall) account(usage *pb.Usage, timing *pb.Timing) {
	if usage != nil {
		usage.PromptTokens -= uint32(r.numBefore)
		usage.CachedPromptTokens = min(usage.CachedPromptTokens, usage.PromptTokens)
		usage.OutputTokens += uint32(r.numBefore)
	}
	if timing != nil {
		timing.FirstTokenDuration = durationpb.New(r.firstToken)
		timing.TotalDuration = durationpb.New(timing.TotalDuration.AsDuration() + r.opened.Sub(r.began))
	}
}

func notResumable(cut error, numOutputs uint32) error {
	var failure *Error
	if !errors.As(cut, &failure) {
		return cut
	}
	told := *failure
	told.Message += fmt.Sprintf("; a stream with num_outputs %d cannot be resumed", numOutputs)
	return &told
}

func shortened(limit *durationpb.Duration, elapsed time.Duration) *durationpb.Duration {
	return durationpb.New(max(limit.AsDuration()-elapsed, time.Millisecond))
}
