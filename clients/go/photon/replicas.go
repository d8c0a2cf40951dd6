package photon

import (
	"context"
	"net"
	"strings"
	"sync"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/roundrobin"
	"google.golang.org/grpc/connectivity"
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
	known := &replicas{byConn: map[balancer.SubConn]*replica{}}
	return balancer.Get(roundrobin.Name).Build(apartConn{conn, known}, options)
}

type apartConn struct {
	balancer.ClientConn
	replicas *replicas
}

func (c apartConn) NewSubConn(addresses []resolver.Address, options balancer.NewSubConnOptions) (balancer.SubConn, error) {
	var conn balancer.SubConn
	listener := options.StateListener
	options.StateListener = func(state balancer.SubConnState) {
		if state.ConnectivityState != connectivity.Ready {
			c.replicas.forget(conn)
		}
		listener(state)
	}
	var err error
	//lint:ignore SA1019 It is the only way to a SubConn; round_robin gives it one address.
	conn, err = c.ClientConn.NewSubConn(addresses, options)
	return conn, err
}

func (c apartConn) UpdateState(state balancer.State) {
	state.Picker = apartPicker{state.Picker, c.replicas}
	c.ClientConn.UpdateState(state)
}

type apartPicker struct {
	balancer.Picker
	replicas *replicas
}

func (p apartPicker) Pick(info balancer.PickInfo) (balancer.PickResult, error) {
	taken, isHedged := info.Ctx.Value(takenKey{}).(*takenReplicas)
	chooser, isChoosy := info.Ctx.Value(chooserKey{}).(chooser)
	if !isHedged && !isChoosy {
		return p.Picker.Pick(info)
	}
	var possible *balancer.PickResult
	for range maxPassedOver {
		result, err := p.Picker.Pick(info)
		if err != nil {
			return result, err
		}
		if isChoosy {
			how, err := chooser.choose(p.replicas.of(result.SubConn))
			switch {
			case err != nil:
				return result, err
			case how == unfit:
				continue
			case how == fit:
				possible = &result
				continue
			case how == nearest:
				return result, nil
			}
		}
		possible = &result
		if !isHedged || taken.add(result.SubConn) {
			return result, nil
		}
	}
	if possible == nil {
		return balancer.PickResult{}, chooser.nobody()
	}
	return *possible, nil
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
