package photon

import (
	"context"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// directCall is a StreamGenerate of its own.
type directCall struct {
	client *Client
	ctx    context.Context
	stream grpc.ServerStreamingClient[pb.StreamGenerateResponse]
	err    error
}

func (c *Client) openCall(ctx context.Context, request *pb.GenerateRequest) call {
	stream, err := c.inference.StreamGenerate(ctx, request)
	return &directCall{client: c, ctx: ctx, stream: stream, err: err}
}

func (d *directCall) Recv() (*pb.StreamGenerateResponse, error) {
	if d.err != nil {
		return nil, d.client.toError(d.ctx, d.err, metadata.MD{})
	}
	message, err := d.stream.Recv()
	if err == nil || err == io.EOF {
		return message, err
	}
	return nil, d.client.toError(d.ctx, err, d.stream.Trailer())
}
