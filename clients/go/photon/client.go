// Package photon calls a photon_grpc server: typed, streaming, with retries, resumption and errors that carry numbers.
//
//	client, err := photon.NewClient("127.0.0.1:50051")
//	…
//	for delta, err := range client.Stream(ctx, photon.Text("def fib(n):"), photon.WithMaxTokens(64)).All() {
//		…
//		fmt.Print(delta.Text)
//	}
package photon

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// Caller takes requests: a Client, or a Multiplex.
type Caller interface {
	// Generate gives the whole result at once.
	Generate(ctx context.Context, prompt Prompt, options ...Option) (*Generation, error)
	// Stream gives the result as it is produced. The request is on its way when it returns; the stream must be read to its
	// end, closed, or its context cancelled, each of which frees what it holds on the server.
	Stream(ctx context.Context, prompt Prompt, options ...Option) *Stream
}

// Client calls one server, or one name behind which several stand. Its methods may be called at the same time.
//
// Each call has a deadline: the context's, else the client's default (DefaultTimeout). A call that fails before anything
// of its answer came is sent again as the service config says. Errors are *Error.
type Client struct {
	target string
	*settings
	// To replicas that say that they are ready, and to any.
	ready, any *grpc.ClientConn
	inference  pb.InferenceServiceClient
	models     pb.ModelServiceClient
	// Calls of ModelService to the replicas that generate.
	checkedModels pb.ModelServiceClient
	// What is known of all replicas where the balancer is not ours, and whether it is.
	asAWhole        *replica
	choosesReplicas atomic.Bool
	sets            sentSets
	closed          atomic.Bool
}

// NewClient makes a client that connects on first use. target is HOST:PORT, unix:PATH, dns:///NAME:PORT,
// ipv4:ADDRESS:PORT,ADDRESS:PORT or any other name that gRPC resolves. Without WithTLS the connection is in clear text.
func NewClient(target string, options ...ClientOption) (*Client, error) {
	c := &Client{target: target, settings: newSettings(options)}
	var err error
	if c.ready, err = c.dial(target); err != nil {
		return nil, err
	}
	if c.any, err = c.dial(target, grpc.WithDisableHealthCheck()); err != nil {
		return nil, err
	}
	c.inference, c.models = pb.NewInferenceServiceClient(c.ready), pb.NewModelServiceClient(c.any)
	c.checkedModels, c.asAWhole = pb.NewModelServiceClient(c.ready), newReplicaOf(nil)
	return c, nil
}

// Close ends what still runs.
func (c *Client) Close() error {
	c.closed.Store(true)
	return errors.Join(c.ready.Close(), c.any.Close())
}

// Generate implements Caller.
func (c *Client) Generate(ctx context.Context, prompt Prompt, options ...Option) (*Generation, error) {
	r, err := newRequest(prompt, options)
	if err != nil {
		return nil, err
	}
	ctx, cancel := c.withDeadline(ctx, r.timeout)
	defer cancel()
	var answer *pb.GenerateResponse
	if r.hedge == nil {
		answer, err = c.generate(ctx, r.message)
	} else {
		answer, err = c.hedged(ctx, r.message, *r.hedge)
	}
	if err != nil {
		return nil, err
	}
	return readGeneration(answer), nil
}

// Stream implements Caller.
func (c *Client) Stream(ctx context.Context, prompt Prompt, options ...Option) *Stream {
	return c.openStream(ctx, c.openCall, prompt, options)
}

// Models are those that are served, the default one first.
func (c *Client) Models(ctx context.Context) ([]*pb.Model, error) {
	ctx, cancel := c.withDeadline(ctx, 0)
	defer cancel()
	var models []*pb.Model
	request := &pb.ListModelsRequest{}
	for {
		page, err := unary(ctx, c, c.models.ListModels, request)
		if err != nil {
			return nil, err
		}
		models = append(models, page.Models...)
		if page.NextPageToken == "" {
			return models, nil
		}
		request.PageToken = page.NextPageToken
	}
}

// Model is one that is served; "" is the default one.
func (c *Client) Model(ctx context.Context, name string) (*pb.Model, error) {
	ctx, cancel := c.withDeadline(ctx, 0)
	defer cancel()
	answer, err := unary(ctx, c, c.models.GetModel, &pb.GetModelRequest{Model: name})
	return answer.GetModel(), err
}

// Tokenize gives the ids that Generate would see for a Text or a Chat with the same options.
func (c *Client) Tokenize(ctx context.Context, prompt Prompt, options ...Option) ([]uint32, error) {
	r, err := newRequest(prompt, options)
	if err != nil {
		return nil, err
	}
	request := &pb.TokenizeRequest{Model: r.message.Model, ParseSpecialTokens: r.message.ParseSpecialTokens}
	switch input := r.message.Input.(type) {
	case *pb.GenerateRequest_Text:
		request.Input = &pb.TokenizeRequest_Text{Text: input.Text}
	case *pb.GenerateRequest_Chat:
		request.Input = &pb.TokenizeRequest_Chat{Chat: input.Chat}
	default:
		return nil, invalid("input", "the prompt is neither text nor a chat")
	}
	ctx, cancel := c.withDeadline(ctx, r.timeout)
	defer cancel()
	answer, err := c.tokenize(ctx, request)
	return answer.GetTokenIds(), err
}

func (c *Client) tokenize(ctx context.Context, request *pb.TokenizeRequest) (*pb.TokenizeResponse, error) {
	admission := &admission{client: c, field: firstCautious(request.ProtoReflect(), cautiousOfTokenize)}
	if admission.field == "" {
		return unary(ctx, c, c.models.Tokenize, request)
	}
	return admitted(ctx, admission, func(ctx context.Context) (*pb.TokenizeResponse, error) {
		return unary(ctx, c, c.checkedModels.Tokenize, request)
	})
}

// Detokenize gives the text that ids release. Of the options WithModel and WithSkipSpecialTokens count.
func (c *Client) Detokenize(ctx context.Context, ids []uint32, options ...Option) (string, error) {
	r, err := newRequest(TokenIDs(ids), options)
	if err != nil {
		return "", err
	}
	ctx, cancel := c.withDeadline(ctx, r.timeout)
	defer cancel()
	answer, err := unary(ctx, c, c.models.Detokenize, &pb.DetokenizeRequest{
		Model:             r.message.Model,
		TokenIds:          r.message.GetTokenIds(),
		SkipSpecialTokens: r.output().SkipSpecialTokens,
	})
	return answer.GetText(), err
}

// WaitUntilReady returns when a request sent now would run, or with the context's end: where it has none, after 60 s.
func (c *Client) WaitUntilReady(ctx context.Context) error {
	ctx, cancel := withDefaultDeadline(ctx, time.Minute)
	defer cancel()
	for {
		state := c.ready.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Shutdown:
			return closedError()
		case connectivity.Idle:
			c.ready.Connect()
		}
		if !c.ready.WaitForStateChange(ctx, state) {
			message := c.target + " did not become ready in time"
			return &Error{Code: codes.Unavailable, Reason: Unavailable, Message: message}
		}
	}
}

func (c *Client) withDeadline(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout > 0 {
		return context.WithTimeout(ctx, timeout)
	}
	return withDefaultDeadline(ctx, c.timeout)
}

func withDefaultDeadline(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has || limit <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, limit)
}

func (c *Client) generate(ctx context.Context, request *pb.GenerateRequest) (*pb.GenerateResponse, error) {
	dispatch := c.newDispatch(request)
	answer, err := admitted(ctx, dispatch, func(ctx context.Context) (*pb.GenerateResponse, error) {
		return unary(ctx, c, c.inference.Generate, dispatch.message)
	})
	if err == nil {
		dispatch.arrived()
	}
	return answer, err
}

// admitted sends a request until it reached a replica that may have it.
func admitted[A any](ctx context.Context, admission interface {
	context(context.Context) (context.Context, error)
	again(context.Context, error) (bool, error)
}, send func(context.Context) (A, error)) (A, error) {
	for {
		own, err := admission.context(ctx)
		if err != nil {
			var none A
			return none, err
		}
		answer, err := send(own)
		if err == nil {
			return answer, nil
		}
		isAgain, err := admission.again(ctx, err)
		if !isAgain {
			return answer, err
		}
	}
}

// unary makes a call whose failure is an *Error.
func unary[Q, A any](
	ctx context.Context, c *Client, method func(context.Context, Q, ...grpc.CallOption) (A, error), request Q,
) (A, error) {
	var trailer metadata.MD
	answer, err := method(ctx, request, grpc.Trailer(&trailer))
	return answer, c.toError(ctx, err, trailer)
}
