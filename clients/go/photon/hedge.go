package photon

import (
	"context"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// maxRequestIDLength is the most characters that servers take.
const maxRequestIDLength = 128

type attempt struct {
	answer *pb.GenerateResponse
	err    error
}

// hedged sends the request, and to another replica once more when there is no answer after delay or the first attempt
// failed in a way that another may not. The first answer counts; what else runs is cancelled.
func (c *Client) hedged(ctx context.Context, request *pb.GenerateRequest, delay time.Duration) (*pb.GenerateResponse, error) {
	ctx, cancel := context.WithCancel(apart(ctx))
	defer cancel()
	done := make(chan attempt, 2)
	send := func(n int) {
		own := proto.CloneOf(request)
		own.RequestId = attemptID(request.RequestId, n)
		go func() {
			answer, err := c.generate(ctx, own)
			done <- attempt{answer, err}
		}()
	}
	send(1)
	timer := time.NewTimer(delay)
	defer timer.Stop()
	for sent, ended := 1, 0; ; {
		select {
		case <-timer.C:
			if sent == 1 {
				send(2)
				sent = 2
			}
		case end := <-done:
			ended++
			if end.err == nil || !isRetryable(end.err) || ended == 2 {
				return end.answer, end.err
			}
			if sent == 1 {
				send(2)
				sent = 2
			}
		}
	}
}

// attemptID is the id of the n-th attempt at a request, counted from 1; the first one's is the caller's. Where the
// caller gave none, the server assigns one.
func attemptID(id string, n int) string {
	if id == "" || n == 1 {
		return id
	}
	suffix := "~" + strconv.Itoa(n)
	return id[:min(len(id), maxRequestIDLength-len(suffix))] + suffix
}
