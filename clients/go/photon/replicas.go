package photon

import (
	"context"
	"net"
	"strings"
	"sync"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/roundrobin"
	"google.golang.org/grpc/resolver"
)

// apartPolicy is round_robin that sends attempts of one hedged call to different replicas.
const apartPolicy = "photon_apart_round_robin"

// Replicas that are passed over before a second attempt goes where the first one is.
const maxPassedOver = 64

func init() { balancer.Register(apartBuilder{}) }

type apartBuilder struct{}

func (apartBuilder) Name() string { return apartPolicy }

func (apartBuilder) Build(conn balancer.ClientConn, options balancer.BuildOptions) balancer.Balancer {
	return balancer.Get(roundrobin.Name).Build(apartConn{conn}, options)
}

type apartConn struct{ balancer.ClientConn }

func (c apartConn) UpdateState(state balancer.State) {
	state.Picker = apartPicker{state.Picker}
	c.ClientConn.UpdateState(state)
}

type apartPicker struct{ balancer.Picker }

func (p apartPicker) Pick(info balancer.PickInfo) (balancer.PickResult, error) {
	taken, ok := info.Ctx.Value(takenKey{}).(*takenReplicas)
	if !ok {
		return p.Picker.Pick(info)
	}
	var result balancer.PickResult
	for range maxPassedOver {
		var err error
		if result, err = p.Picker.Pick(info); err != nil || taken.add(result.SubConn) {
			return result, err
		}
	}
	return result, nil
}

type takenKey struct{}

// takenReplicas are those that attempts of one call went to.
type takenReplicas struct {
	mu  sync.Mutex
	set map[balancer.SubConn]bool
}

func apart(ctx context.Context) context.Context {
	return context.WithValue(ctx, takenKey{}, &takenReplicas{set: map[balancer.SubConn]bool{}})
}

// add reports whether replica is another one than those before.
func (t *takenReplicas) add(replica balancer.SubConn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	isNew := !t.set[replica]
	t.set[replica] = true
	return isNew
}

// addressList resolves ipv4:HOST:PORT,HOST:PORT and its like of ipv6, as gRPC's other languages do.
type addressList string

func (a addressList) Scheme() string { return string(a) }

func (addressList) Build(
	target resolver.Target, conn resolver.ClientConn, _ resolver.BuildOptions,
) (resolver.Resolver, error) {
	var state resolver.State
	for _, address := range strings.Split(target.Endpoint(), ",") {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return nil, err
		}
		endpoint := resolver.Endpoint{Addresses: []resolver.Address{{Addr: address}}}
		state.Endpoints = append(state.Endpoints, endpoint)
	}
	return fixedResolver{}, conn.UpdateState(state)
}

// OverrideAuthority is what TLS checks the certificate for: the first of the list.
func (addressList) OverrideAuthority(target resolver.Target) string {
	first, _, _ := strings.Cut(target.Endpoint(), ",")
	return first
}

type fixedResolver struct{}

func (fixedResolver) ResolveNow(resolver.ResolveNowOptions) {}

func (fixedResolver) Close() {}
