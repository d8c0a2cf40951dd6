package photon

import (
	"context"
	"io"

	"google.golang.org/grpc"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// directCall is a StreamGenerate of its own. gRPC sends it again until headers of an answer came, this where the connection
// is lost between them and the first message.
type directCall struct {
	client   *Client
	ctx      context.Context
	request  *pb.GenerateRequest
	stream   grpc.ServerStreamingClient[pb.StreamGenerateResponse]
	err      error
	attempts int
	hasBegun bool
}

func (c *Client) openCall(ctx context.Context, request *pb.GenerateRequest) call {
	call := &directCall{client: c, ctx: ctx, request: request}
	call.open()
	return call
}

func (d *directCall) open() {
	d.attempts++
	d.stream, d.err = d.client.inference.StreamGenerate(d.ctx, d.request)
}

func (d *directCall) Recv() (*pb.StreamGenerateResponse, error) {
	for {
		message, err := d.receive()
		if err == nil {
			d.hasBegun = true
			return message, nil
		}
		if !d.isLeftToUs() {
			return nil, err
		}
		if err := pause(d.ctx, err, d.attempts-1); err != nil {
			return nil, err
		}
		d.open()
	}
}

func (d *directCall) receive() (*pb.StreamGenerateResponse, error) {
	if d.err != nil {
		return nil, d.client.toError(d.ctx, d.err, nil)
	}
	message, err := d.stream.Recv()
	if err == nil || err == io.EOF {
		return message, err
	}
	return nil, d.client.toError(d.ctx, err, d.stream.Trailer())
}

func (d *directCall) isLeftToUs() bool {
	if d.hasBegun || d.err != nil || !d.client.retries || d.attempts >= policy.MaxAttempts {
		return false
	}
	headers, err := d.stream.Header()
	return err == nil && headers != nil
}
