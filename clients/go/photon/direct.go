package photon

import (
	"context"
	"io"

	"google.golang.org/grpc"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// directCall is a StreamGenerate of its own. gRPC sends it again until headers of an answer came, this where the connection
// is lost between them and the first message, heartbeats not counted.
type directCall struct {
	*dispatch
	ctx      context.Context
	stream   grpc.ServerStreamingClient[pb.StreamGenerateResponse]
	err      error
	attempts int
	hasBegun bool
}

func (c *Client) openCall(ctx context.Context, request *pb.GenerateRequest) call {
	call := &directCall{dispatch: c.newDispatch(request), ctx: ctx, attempts: 1}
	call.open()
	return call
}

func (d *directCall) open() {
	var ctx context.Context
	if ctx, d.err = d.context(d.ctx); d.err == nil {
		d.stream, d.err = d.client.inference.StreamGenerate(ctx, d.message)
	}
}

func (d *directCall) Recv() (*pb.StreamGenerateResponse, error) {
	for {
		message, err := d.receive()
		switch {
		case err == nil && isHeartbeat(message):
			continue
		case err == nil:
			d.begin()
			return message, nil
		case d.hasBegun:
			return nil, err
		}
		isAgain, err := d.again(d.ctx, err)
		if !isAgain {
			if !d.isLeftToUs() {
				return nil, err
			}
			if err := pause(d.ctx, err, d.attempts-1); err != nil {
				return nil, err
			}
			d.attempts++
		}
		d.open()
	}
}

func (d *directCall) begin() {
	if !d.hasBegun {
		d.hasBegun = true
		d.arrived()
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
	if d.err != nil || !d.client.retries || d.attempts >= policy.MaxAttempts {
		return false
	}
	headers, err := d.stream.Header()
	return err == nil && headers != nil
}
