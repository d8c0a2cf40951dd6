package photon

import (
	"context"
	"sync"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// inbox is what came of one request and was not read yet.
type inbox struct {
	id       string
	mu       sync.Mutex
	messages []*pb.StreamGenerateResponse
	// What ended it, behind the messages.
	err  error
	news chan struct{}
	// Ends the wait for the caller's context.
	release func() bool
}

func newInbox(id string) *inbox { return &inbox{id: id, news: make(chan struct{}, 1)} }

func (i *inbox) next(ctx context.Context) (*pb.StreamGenerateResponse, error) {
	for {
		i.mu.Lock()
		if len(i.messages) > 0 {
			message := i.messages[0]
			i.messages = i.messages[1:]
			i.mu.Unlock()
			return message, nil
		}
		err := i.err
		i.mu.Unlock()
		if err != nil {
			return nil, err
		}
		select {
		case <-i.news:
		case <-ctx.Done():
			return nil, contextError(ctx)
		}
	}
}

func (i *inbox) put(message *pb.StreamGenerateResponse, err error) {
	i.mu.Lock()
	if message != nil {
		i.messages = append(i.messages, message)
	}
	if i.err == nil {
		i.err = err
	}
	i.mu.Unlock()
	select {
	case i.news <- struct{}{}:
	default:
	}
}
