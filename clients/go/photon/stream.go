package photon

import (
	"context"
	"errors"
	"io"
	"iter"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// call is one StreamGenerate, or one request of a multiplexed stream. Its context's end ends it.
type call interface {
	// Recv gives the next message, io.EOF after the last, else an *Error.
	Recv() (*pb.StreamGenerateResponse, error)
}

// openFunc sends a request. A failure is told by the call's first Recv.
type openFunc func(context.Context, *pb.GenerateRequest) call

// Stream is one generation while it runs. One goroutine may read it; Close may be called from any.
type Stream struct {
	cancel context.CancelFunc
	call   call
	ready  []*pb.Output
	start  *Start
	usage  Usage
	timing Timing
	// A continuation came from a server with other numerics.
	isInexact bool
	// What ended it.
	err error
}

func (c *Client) openStream(ctx context.Context, open openFunc, prompt Prompt, options []Option) *Stream {
	r, err := newRequest(prompt, options)
	if err == nil && r.hedge != nil {
		err = invalid("", "only the Generate of a Client is hedged")
	}
	if err != nil {
		return &Stream{cancel: func() {}, err: err}
	}
	ctx, cancel := c.withDeadline(ctx, r.timeout)
	if c.resumeTimeout > 0 {
		return &Stream{cancel: cancel, call: newResumedCall(ctx, open, r.message, c.resumeTimeout)}
	}
	return &Stream{cancel: cancel, call: open(ctx, r.message)}
}

// All iterates over the deltas; the last pair has the error, where there is one. Leaving the loop closes the stream.
func (s *Stream) All() iter.Seq2[Delta, error] {
	return func(yield func(Delta, error) bool) {
		defer s.Close()
		for {
			delta, err := s.Recv()
			if err == io.EOF || !yield(delta, err) || err != nil {
				return
			}
		}
	}
}

// Recv gives the next delta, io.EOF after the last, else an *Error. What came before an error stands.
func (s *Stream) Recv() (Delta, error) {
	delta, err := s.next()
	if err != nil {
		return Delta{}, err
	}
	return readOutput(delta), nil
}

func (s *Stream) next() (*pb.Output, error) {
	for len(s.ready) == 0 {
		if s.err != nil {
			return nil, s.err
		}
		message, err := s.call.Recv()
		if err != nil {
			s.err = err
			s.cancel()
			continue
		}
		s.take(message)
	}
	delta := s.ready[0]
	s.ready = s.ready[1:]
	return delta, nil
}

// Close ends the request; nothing happens once it has ended.
func (s *Stream) Close() { s.cancel() }

// Start is known with the first delta, nil before.
func (s *Stream) Start() *Start { return s.start }

// Usage is known at the end; with WithContinuousUsage with every delta.
func (s *Stream) Usage() Usage { return s.usage }

// IsBitExact tells whether all ids so far are those that the first server would have given. It becomes false where another
// server continues the stream that may compute other bits (docs/numerics.md).
func (s *Stream) IsBitExact() bool { return !s.isInexact }

// Timing is known at the end.
func (s *Stream) Timing() Timing { return s.timing }

// Collect reads to the end and gives the whole.
func (s *Stream) Collect() (*Generation, error) {
	defer s.Close()
	joined := outputs{}
	for {
		delta, err := s.next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		joined.add(delta)
	}
	if s.start == nil {
		return nil, errors.New("photon: the stream was closed before it was read")
	}
	result := newGeneration(*s.start, joined.inOrder(), s.usage, s.timing)
	result.IsBitExact = s.IsBitExact()
	return result, nil
}

func (s *Stream) take(message *pb.StreamGenerateResponse) {
	if message.Start != nil && s.start != nil {
		s.isInexact = true
	} else if message.Start != nil {
		s.start = readStart(message.Start)
	}
	if message.Usage != nil {
		s.usage = readUsage(message.Usage)
	}
	if message.Timing != nil {
		s.timing = readTiming(message.Timing)
	}
	s.ready = message.Deltas
}
