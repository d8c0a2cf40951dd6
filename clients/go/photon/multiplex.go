package photon

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// No message but the first and the last.
const atTheEnd = 1<<32 - 1

// Multiplex sends many requests on one MultiplexGenerate: cheaper for the server and for its caller from some dozens of
// streams on. One that fails harms no other. When the shared stream is lost or its server drains, another is opened, and
// requests that ran go on there. A server that needs the place of a shared stream ends it while it is idle: the next request
// opens another.
type Multiplex struct {
	client *Client
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.Mutex
	shared *sharedStream
}

// Multiplex opens its shared stream with the first request. The context's end, or Close, ends all requests; its deadline
// counts for them together, each has one of its own besides.
func (c *Client) Multiplex(ctx context.Context) *Multiplex {
	ctx, cancel := context.WithCancel(ctx)
	return &Multiplex{client: c, ctx: ctx, cancel: cancel}
}

// Close ends what still runs.
func (m *Multiplex) Close() { m.cancel() }

// Generate implements Caller. Hedging is for a Client's own calls.
func (m *Multiplex) Generate(ctx context.Context, prompt Prompt, options ...Option) (*Generation, error) {
	return m.Stream(ctx, prompt, append(options[:len(options):len(options)], WithMaxTokensPerMessage(atTheEnd))...).Collect()
}

// Stream implements Caller.
func (m *Multiplex) Stream(ctx context.Context, prompt Prompt, options ...Option) *Stream {
	return m.client.openStream(ctx, m.openCall, prompt, options)
}

func (m *Multiplex) openCall(ctx context.Context, request *pb.GenerateRequest) call {
	if deadline, has := ctx.Deadline(); has {
		left := durationpb.New(max(time.Until(deadline), time.Millisecond))
		if timeout := request.GetScheduling().GetTimeout(); timeout == nil || timeout.AsDuration() > left.AsDuration() {
			made(&request.Scheduling).Timeout = left
		}
	}
	if request.RequestId == "" {
		request.RequestId = rand.Text()
	}
	call := &multiplexedCall{dispatch: m.client.newDispatch(request), multiplex: m, ctx: ctx, attempts: 1}
	call.ask()
	return call
}

// stream is the shared stream that new requests go to.
func (m *Multiplex) stream() *sharedStream {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.shared == nil {
		m.shared = newSharedStream(m)
	}
	return m.shared
}

// leave sends new requests elsewhere; those on the stream are read to their end.
func (m *Multiplex) leave(stream *sharedStream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.shared == stream {
		m.shared = nil
	}
}

// multiplexedCall is one request among others. As gRPC does with calls, it is sent again where it failed before its
// first message.
type multiplexedCall struct {
	*dispatch
	multiplex *Multiplex
	ctx       context.Context
	attempts  int
	reopened  int
	hasBegun  bool
	inbox     *inbox
}

// maxReopened is how many shared streams a request may be sent on again: a server that takes the place of each new one
// away is full.
const maxReopened = 8

func (c *multiplexedCall) ask() {
	shared := c.multiplex.stream()
	err := shared.admit(c.ctx, c.field)
	if err != nil && c.isShort() {
		c.giveUpDigest(err)
		err = shared.admit(c.ctx, c.field)
	}
	if err != nil {
		c.inbox = newInbox("")
		c.inbox.put(nil, err)
		return
	}
	c.inbox = shared.ask(c.ctx, c.message)
}

func (c *multiplexedCall) Recv() (*pb.StreamGenerateResponse, error) {
	for {
		message, err := c.inbox.next(c.ctx)
		if err == nil && isHeartbeat(message) {
			continue
		}
		if err == nil {
			if !c.hasBegun {
				c.hasBegun = true
				c.arrived()
			}
			return message, nil
		}
		if !c.hasBegun {
			var isAgain bool
			if isAgain, err = c.again(c.ctx, err); isAgain {
				c.ask()
				continue
			}
		}
		if err != io.EOF && !c.hasBegun && c.reopened < maxReopened && errors.Is(err, IdleStreamEvicted) {
			// The stream was idle for its server: the request was still on its way.
			c.reopened++
			c.ask()
			continue
		}
		if err == io.EOF || c.hasBegun || !c.multiplex.client.retries || c.attempts >= policy.MaxAttempts {
			return nil, err
		}
		if err := pause(c.ctx, err, c.attempts-1); err != nil {
			return nil, err
		}
		c.attempts++
		c.ask()
	}
}

// sharedStream is one MultiplexGenerate. One goroutine writes it, one reads it.
type sharedStream struct {
	multiplex *Multiplex
	ctx       context.Context
	cancel    context.CancelFunc

	mu sync.Mutex
	// Requests in flight.
	byID map[string]*inbox
	// Not written yet.
	actions []*pb.MultiplexGenerateRequest
	wake    chan struct{}
	// Closed when it is known which replica it goes to, or that it cannot be opened.
	opened  chan struct{}
	isOpen  bool
	replica noted
	// Why it is over.
	err error
}

func newSharedStream(m *Multiplex) *sharedStream {
	ctx, cancel := context.WithCancel(m.ctx)
	s := &sharedStream{
		multiplex: m, ctx: ctx, cancel: cancel, byID: map[string]*inbox{}, wake: make(chan struct{}, 1),
		opened: make(chan struct{}),
	}
	go s.run()
	return s
}

// maxIDChars is what servers tell of an id at most, by which the answer finds its request.
const maxIDChars = 128

// ask sends a request and gives where its answer comes. The context's end ends it on the server.
func (s *sharedStream) ask(ctx context.Context, request *pb.GenerateRequest) *inbox {
	box := newInbox(request.RequestId)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch _, isTaken := s.byID[box.id]; {
	case s.err != nil:
		box.put(nil, s.err)
	case len(box.id) > maxIDChars:
		box.put(nil, invalid("request_id", "has %d characters; %d may", len(box.id), maxIDChars))
	case isTaken:
		box.put(nil, &Error{
			Code:    codes.AlreadyExists,
			Reason:  DuplicateRequestId,
			Message: fmt.Sprintf("%q is in flight on this stream", box.id),
		})
	default:
		s.byID[box.id] = box
		s.send(&pb.MultiplexGenerateRequest{Action: &pb.MultiplexGenerateRequest_Generate{Generate: request}})
		box.release = context.AfterFunc(ctx, func() { s.abort(box) })
	}
	return box
}

// admit gives the error of a request that sets a field which the stream's server would ignore.
func (s *sharedStream) admit(ctx context.Context, field string) error {
	if field == "" {
		return nil
	}
	select {
	case <-s.opened:
	case <-ctx.Done():
		return contextError(ctx)
	}
	if !s.isOpen {
		// The request is told why.
		return nil
	}
	client, replica := s.multiplex.client, s.replica.replica.Load()
	if replica == nil {
		replica = client.asAWhole
	}
	if err := client.ask(ctx, replica); err != nil {
		return err
	}
	return replica.admit(field)
}

func (s *sharedStream) abort(box *inbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID[box.id] == box {
		cancel := &pb.MultiplexGenerateRequest_Cancel{RequestId: box.id}
		s.send(&pb.MultiplexGenerateRequest{Action: &pb.MultiplexGenerateRequest_Cancel_{Cancel: cancel}})
	}
}

// send is called with the lock held.
func (s *sharedStream) send(action *pb.MultiplexGenerateRequest) {
	s.actions = append(s.actions, action)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *sharedStream) run() {
	defer s.cancel()
	stream, err := s.multiplex.client.inference.MultiplexGenerate(choosing(s.ctx, &s.replica))
	s.isOpen = err == nil
	close(s.opened)
	if err == nil {
		go s.write(stream)
		err = s.read(stream)
	}
	s.multiplex.leave(s)
	if err == io.EOF {
		err = grpcstatus.Error(codes.Unavailable, "the server has ended the stream")
	}
	s.fail(s.multiplex.client.toError(s.multiplex.ctx, err, nil))
}

func (s *sharedStream) write(stream grpc.BidiStreamingClient[pb.MultiplexGenerateRequest, pb.MultiplexGenerateResponse]) {
	for {
		select {
		case <-s.wake:
		case <-s.ctx.Done():
			return
		}
		s.mu.Lock()
		actions := s.actions
		s.actions = nil
		s.mu.Unlock()
		for _, action := range actions {
			// Why it failed is what the reader is told.
			if stream.Send(action) != nil {
				return
			}
		}
	}
}

func (s *sharedStream) read(stream grpc.BidiStreamingClient[pb.MultiplexGenerateRequest, pb.MultiplexGenerateResponse]) error {
	byHandle := map[uint32]*inbox{}
	for {
		frame, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, item := range frame.Items {
			s.tell(byHandle, item)
		}
	}
}

func (s *sharedStream) tell(byHandle map[uint32]*inbox, item *pb.MultiplexItem) {
	box := byHandle[item.Handle]
	if box == nil {
		s.mu.Lock()
		box = s.byID[item.RequestId]
		s.mu.Unlock()
		if box == nil {
			return
		}
		byHandle[item.Handle] = box
	}
	response := item.GetResponse()
	var end error
	if failed := item.GetError(); failed != nil {
		end = s.itemError(failed)
	} else if response.GetTiming() != nil {
		end = io.EOF
	}
	if end != nil {
		delete(byHandle, item.Handle)
		s.mu.Lock()
		delete(s.byID, box.id)
		s.mu.Unlock()
		box.release()
	}
	box.put(response, end)
}

func (s *sharedStream) itemError(failed *status.Status) error {
	told := grpcstatus.FromProto(failed)
	failure := fromStatus(told, s.multiplex.client.target)
	failure.cause = told.Err()
	if failure.Reason == Draining {
		s.multiplex.leave(s)
	}
	return failure
}

// fail ends all requests in flight with err, and so those that come.
func (s *sharedStream) fail(err error) {
	s.mu.Lock()
	s.err = err
	boxes := s.byID
	s.byID = map[string]*inbox{}
	s.mu.Unlock()
	for _, box := range boxes {
		box.release()
		box.put(nil, err)
	}
}
