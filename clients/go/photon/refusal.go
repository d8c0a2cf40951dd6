package photon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// A server without FEATURE_UNKNOWN_FIELDS_REFUSED ignores fields that it does not know. Some change the answer: the proto
// marks them with `needs_refusal`. A request that sets one goes only to a server that would refuse it, and each server is
// asked for its features once per connection, when the first such request is about to go to it.

// admission is one request on its way to such a server.
type admission struct {
	client *Client
	// Path of a field that needs a refusal; empty: the request goes anywhere.
	field string
	// Where the request goes if it can; nil: anywhere.
	near  *replica
	guard *guard
	tries int
}

// context makes the context of an attempt.
func (a *admission) context(ctx context.Context) (context.Context, error) {
	if a.field == "" && a.near == nil {
		return ctx, nil
	}
	if a.field != "" {
		isOurs, err := a.client.picksByChooser(ctx)
		if err != nil {
			return nil, err
		}
		if !isOurs {
			return ctx, a.client.asAWhole.admit(a.field)
		}
	}
	a.guard = &guard{field: a.field, near: a.near}
	return choosing(ctx, a.guard), nil
}

// again reports whether to send an attempt that failed again at once: the replica whose turn it was had not been asked.
func (a *admission) again(ctx context.Context, failure error) (bool, error) {
	if a.guard == nil {
		return false, failure
	}
	unasked := a.guard.unasked.Swap(nil)
	if unasked == nil {
		return false, failure
	}
	err := a.client.ask(ctx, unasked)
	if !errors.Is(err, Unavailable) {
		return err == nil, err
	}
	// The replica left. Another may be there.
	if a.tries++; a.tries >= policy.MaxAttempts {
		return false, err
	}
	err = pause(ctx, err, a.tries-1)
	return err == nil, err
}

// replica is one connection to a server.
type replica struct {
	// nil: the ClientConn as a whole.
	conn balancer.SubConn
	// Whether it refuses fields that it does not know; nil before it was asked.
	refuses atomic.Pointer[bool]
	// Full while somebody asks.
	asking chan struct{}
}

func newReplicaOf(conn balancer.SubConn) *replica {
	return &replica{conn: conn, asking: make(chan struct{}, 1)}
}

// admit gives the error of a request with this field, after the replica was asked.
func (r *replica) admit(field string) error {
	if *r.refuses.Load() {
		return nil
	}
	return ignored(field)
}

var errIgnored = errors.New("the server would ignore a field")

func ignored(field string) *Error {
	message := fmt.Sprintf(
		"the server is older than the field %s and would ignore it (it lacks FEATURE_UNKNOWN_FIELDS_REFUSED); "+
			"upgrade the server, or leave the field unset", field)
	return &Error{
		Code:       codes.Unimplemented,
		Reason:     FeatureNotSupported,
		Message:    message,
		Violations: []FieldViolation{{field, message}},
		cause:      errIgnored,
	}
}

// ask finds out whether a replica refuses fields that it does not know, unless that is known.
func (c *Client) ask(ctx context.Context, r *replica) error {
	select {
	case r.asking <- struct{}{}:
		defer func() { <-r.asking }()
	case <-ctx.Done():
		return contextError(ctx)
	}
	if r.refuses.Load() != nil {
		return nil
	}
	// The replicas that attempts of a hedged call went to are not its concern.
	ctx = context.WithValue(ctx, takenKey{}, nil)
	seen := &noted{only: r.conn}
	answer, err := unary(choosing(ctx, seen), c, c.checkedModels.GetModel, &pb.GetModelRequest{})
	if err != nil && status.Code(err) != codes.Unimplemented {
		return err
	}
	refuses := slices.Contains(answer.GetModel().GetFeatures(), pb.Feature_FEATURE_UNKNOWN_FIELDS_REFUSED)
	r.refuses.Store(&refuses)
	if which := seen.replica.Load(); which != nil {
		which.refuses.Store(&refuses)
		c.choosesReplicas.Store(true)
	}
	return nil
}

// picksByChooser reports whether the balancer of this file chooses replicas. A program may have set another one, which
// gives no choice: then one answer counts for all.
func (c *Client) picksByChooser(ctx context.Context) (bool, error) {
	err := c.ask(ctx, c.asAWhole)
	return c.choosesReplicas.Load(), err
}

// replicas are the connections of one ClientConn.
type replicas struct {
	mu     sync.Mutex
	byConn map[balancer.SubConn]*replica
}

func (r *replicas) of(conn balancer.SubConn) *replica {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.byConn[conn]
	if known == nil {
		known = newReplicaOf(conn)
		r.byConn[conn] = known
	}
	return known
}

// forget is called when a connection is lost: behind the next one may be another release.
func (r *replicas) forget(conn balancer.SubConn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.byConn, conn)
}

// chooser says which replicas a call may go to.
type chooser interface {
	// choose says whether it may go to this one; an error ends the call.
	choose(*replica) (fitness, error)
	// nobody is the error when it may go to none.
	nobody() error
}

type fitness int

const (
	unfit   fitness = iota
	fit             // where there is none that is better
	fitting         // at once
	nearest         // at once, even where an attempt of the same hedged call went
)

type chooserKey struct{}

func choosing(ctx context.Context, chooser chooser) context.Context {
	return context.WithValue(ctx, chooserKey{}, chooser)
}

// guard chooses replicas that refuse fields that they do not know, and of those the near one.
type guard struct {
	field   string
	near    *replica
	unasked atomic.Pointer[replica]
	// The one that was chosen.
	chosen atomic.Pointer[replica]
}

func (g *guard) choose(r *replica) (fitness, error) {
	if g.field != "" {
		refuses := r.refuses.Load()
		if refuses == nil {
			g.unasked.Store(r)
			return unfit, status.Error(codes.Unavailable, "the replica has not been asked for its features")
		}
		if !*refuses {
			return unfit, nil
		}
	}
	g.chosen.Store(r)
	switch g.near {
	case nil:
		return fitting, nil
	case r:
		return nearest, nil
	}
	return fit, nil
}

func (g *guard) nobody() error { return ignored(g.field) }

// noted takes any replica, or only one, and remembers it.
type noted struct {
	only    balancer.SubConn
	replica atomic.Pointer[replica]
}

func (n *noted) choose(r *replica) (fitness, error) {
	if n.only != nil && n.only != r.conn {
		return unfit, nil
	}
	n.replica.Store(r)
	return fitting, nil
}

func (n *noted) nobody() error {
	return &Error{Code: codes.Unavailable, Reason: Unreachable, Message: "the connection was lost"}
}

// cautious is a field that needs a refusal, or that has such fields below.
type cautious struct {
	field protoreflect.FieldDescriptor
	below []cautious
}

var (
	cautiousOfGenerate = cautiousFields((&pb.GenerateRequest{}).ProtoReflect().Descriptor())
	cautiousOfTokenize = cautiousFields((&pb.TokenizeRequest{}).ProtoReflect().Descriptor())
)

func cautiousFields(message protoreflect.MessageDescriptor) []cautious {
	var found []cautious
	for i := range message.Fields().Len() {
		field := message.Fields().Get(i)
		if proto.GetExtension(field.Options(), pb.E_NeedsRefusal).(bool) {
			found = append(found, cautious{field: field})
		} else if field.Message() != nil && !field.IsMap() {
			if below := cautiousFields(field.Message()); below != nil {
				found = append(found, cautious{field, below})
			}
		}
	}
	return found
}

// firstCautious gives the path of the first such field that a message sets.
func firstCautious(message protoreflect.Message, fields []cautious) string {
	for _, each := range fields {
		name := string(each.field.Name())
		switch {
		case !message.Has(each.field):
		case each.below == nil:
			return name
		case !each.field.IsList():
			if found := firstCautious(message.Get(each.field).Message(), each.below); found != "" {
				return name + "." + found
			}
		default:
			list := message.Get(each.field).List()
			for i := range list.Len() {
				if found := firstCautious(list.Get(i).Message(), each.below); found != "" {
					return fmt.Sprintf("%s[%d].%s", name, i, found)
				}
			}
		}
	}
	return ""
}
