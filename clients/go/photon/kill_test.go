package photon_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	adminpb "github.com/photon-grpc/photon-grpc/clients/go/photonadminv1"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// replica is a server that TEST_SERVE starts, in a process group of its own.
type replica struct {
	t       *testing.T
	address string
	admin   string
	drain   string // --drain-timeout
	log     *os.File
	command *exec.Cmd
	ended   <-chan struct{}
}

func newReplica(t *testing.T) *replica {
	t.Helper()
	if os.Getenv("TEST_SERVE") == "" {
		t.Skip("TEST_SERVE names no command that starts a server")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	admin := filepath.Join(t.TempDir(), "admin.sock")
	r := &replica{t: t, address: listener.Addr().String(), admin: admin, drain: "0.2", log: log}
	t.Cleanup(func() { r.kill(syscall.SIGKILL) })
	return r
}

func (r *replica) start() {
	r.t.Helper()
	command := strings.Fields(os.Getenv("TEST_SERVE"))
	arguments := append(command[1:], "--listen", r.address, "--admin-listen", "unix:"+r.admin, "--drain-timeout", r.drain)
	r.command = exec.Command(command[0], arguments...)
	r.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	r.command.Stderr = r.log
	if err := r.command.Start(); err != nil {
		r.t.Fatal(err)
	}
	ended := make(chan struct{})
	r.ended = ended
	go func(command *exec.Cmd) {
		command.Wait()
		close(ended)
	}(r.command)
}

// waitUntilReady starts it again where it ended, as what runs servers does.
func (r *replica) waitUntilReady() {
	r.t.Helper()
	client := connect(r.t, r.address)
	defer client.Close()
	ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Minute)
	defer cancel()
	ready := make(chan error, 1)
	go func() { ready <- client.WaitUntilReady(ctx) }()
	for starts := 0; ; starts++ {
		select {
		case err := <-ready:
			if err == nil {
				return
			}
		case <-r.ended:
			if starts < 3 {
				r.start()
				continue
			}
		}
		told, _ := os.ReadFile(r.log.Name())
		r.t.Fatalf("not ready:\n%s", told)
	}
}

// kill sends a signal to the whole server and waits until nothing listens any more.
func (r *replica) kill(signal syscall.Signal) {
	if r.command == nil {
		return
	}
	group := -r.command.Process.Pid
	if signal != syscall.SIGKILL {
		// Its own processes are told by their supervisor.
		group = -group
	}
	syscall.Kill(group, signal)
	<-r.ended
	r.command = nil
	eventually(r.t, "the address is free", func() bool {
		listener, err := net.Listen("tcp", r.address)
		if err == nil {
			listener.Close()
		}
		return err == nil
	})
}

// killFrontend ends the process that the connections are of; its supervisor starts another.
func (r *replica) killFrontend() {
	r.t.Helper()
	pid := strconv.Itoa(r.command.Process.Pid)
	found, err := exec.Command("pgrep", "-P", pid, "-f", "photon_grpc.service.processes.frontend").Output()
	if err != nil {
		r.t.Fatal("no front end of ", pid, ": ", err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(found)))
	if err != nil {
		r.t.Fatal(err)
	}
	syscall.Kill(child, syscall.SIGKILL)
	eventually(r.t, "the front end is gone", func() bool { return syscall.Kill(child, 0) != nil })
}

// numRunning asks AdminService.
func (r *replica) numRunning() uint32 {
	r.t.Helper()
	conn, err := grpc.NewClient("unix:"+r.admin, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		r.t.Fatal(err)
	}
	defer conn.Close()
	answer, err := adminpb.NewAdminServiceClient(conn).GetLoad(r.t.Context(), &adminpb.GetLoadRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	return answer.Load.RunningRequests + answer.Load.QueuedRequests
}

// isReady asks its health.
func (r *replica) isReady() bool {
	r.t.Helper()
	conn, err := grpc.NewClient(r.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		r.t.Fatal(err)
	}
	defer conn.Close()
	request := &healthpb.HealthCheckRequest{Service: pb.InferenceService_ServiceDesc.ServiceName}
	answer, err := healthpb.NewHealthClient(conn).Check(r.t.Context(), request)
	if err != nil {
		r.t.Fatal(err)
	}
	return answer.Status == healthpb.HealthCheckResponse_SERVING
}

func twoReplicas(t *testing.T, drain string) []*replica {
	replicas := []*replica{newReplica(t), newReplica(t)}
	for _, r := range replicas {
		r.drain = drain
		r.start()
	}
	for _, r := range replicas {
		r.waitUntilReady()
	}
	return replicas
}

// resumptions counts requests that continue others.
type resumptions struct {
	grpc.ClientStream
	num *atomic.Int32
}

func (r resumptions) SendMsg(message any) error {
	request, ok := message.(*pb.GenerateRequest)
	if action, isAction := message.(*pb.MultiplexGenerateRequest); isAction {
		request, ok = action.GetGenerate(), true
	}
	if ok && request.GetContinueFrom() != nil {
		r.num.Add(1)
	}
	return r.ClientStream.SendMsg(message)
}

func counting(num *atomic.Int32) photon.ClientOption {
	return photon.WithDialOptions(grpc.WithStreamInterceptor(func(
		ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, next grpc.Streamer, options ...grpc.CallOption,
	) (grpc.ClientStream, error) {
		stream, err := next(ctx, desc, conn, method, options...)
		return resumptions{stream, num}, err
	}))
}

type generated struct {
	ids  []uint32
	text string
}

func generateIDs(ctx context.Context, caller photon.Caller, seed int) (generated, error) {
	result, err := caller.Stream(ctx, photon.Text("def fib(n):"), photon.WithSeed(uint64(seed)), photon.WithTemperature(0.8),
		photon.WithMaxTokens(600), photon.WithIgnoreEOS(true), photon.WithTokenIDs(true)).Collect()
	if err != nil {
		return generated{}, err
	}
	if result.Usage.OutputTokens != len(result.TokenIDs) {
		err = fmt.Errorf("%d ids, but usage says %d", len(result.TokenIDs), result.Usage.OutputTokens)
	}
	return generated{result.TokenIDs, result.Text}, err
}

// Two replicas, one of which is killed again and again, at a random moment, while streams run, and started anew. Every
// stream is what it is undisturbed. TEST_KILLS says how often; of ten times the whole server is killed once, told to
// drain within 0.2 s once, and its front end is killed, which is back sooner, eight times.
func TestKillsLoseAndRepeatNoToken(t *testing.T) {
	replicas := twoReplicas(t, "0.2")
	kills := 3
	if wanted := os.Getenv("TEST_KILLS"); wanted != "" {
		kills, _ = strconv.Atoi(wanted)
	}
	var resumed, read atomic.Int32
	client := connect(t, fmt.Sprintf("ipv4:%s,%s", replicas[0].address, replicas[1].address), counting(&resumed))
	many := client.Multiplex(t.Context())
	defer many.Close()
	callers := []photon.Caller{client, client, many, many}
	var undisturbed []generated
	for seed := range callers {
		whole, err := generateIDs(t.Context(), client, seed)
		if err != nil {
			t.Fatal(err)
		}
		undisturbed = append(undisturbed, whole)
	}

	var isOver atomic.Bool
	var readers sync.WaitGroup
	for seed, caller := range callers {
		readers.Go(func() {
			for !isOver.Load() && !t.Failed() {
				got, err := generateIDs(t.Context(), caller, seed)
				if err != nil {
					t.Errorf("stream %d: %v", seed, err)
				} else if !slices.Equal(got.ids, undisturbed[seed].ids) || got.text != undisturbed[seed].text {
					t.Errorf("stream %d: %q, not %q", seed, got.text, undisturbed[seed].text)
				}
				read.Add(1)
			}
		})
	}
	for kill := 0; kill < kills && !t.Failed(); kill++ {
		time.Sleep(rand.N(time.Second))
		victim := replicas[rand.IntN(2)]
		switch kill % 10 {
		case 0:
			victim.kill(syscall.SIGKILL)
			victim.start()
		case 1:
			victim.kill(syscall.SIGTERM)
			victim.start()
		default:
			victim.killFrontend()
		}
		victim.waitUntilReady()
		t.Logf("%d kills, %d streams, %d continuations", kill+1, read.Load(), resumed.Load())
	}
	isOver.Store(true)
	readers.Wait()
	t.Logf("%d kills, %d streams, %d continuations", kills, read.Load(), resumed.Load())
	if resumed.Load() == 0 {
		t.Error("no stream was cut")
	}
}

func TestLiveNewRequestsLeaveAReplicaThatDrainsWhileTheOldOneEnds(t *testing.T) {
	replicas := twoReplicas(t, "200")
	many := connect(t, fmt.Sprintf("ipv4:%s,%s", replicas[0].address, replicas[1].address)).Multiplex(t.Context())
	defer many.Close()
	old := many.Stream(t.Context(), photon.Text("x"), photon.WithMaxTokens(3000), photon.WithIgnoreEOS(true))
	if _, err := old.Recv(); err != nil {
		t.Fatal(err)
	}
	drained := replicas[0]
	if drained.numRunning() == 0 {
		drained = replicas[1]
	}
	syscall.Kill(drained.command.Process.Pid, syscall.SIGTERM)
	eventually(t, "it drains", func() bool { return !drained.isReady() })
	if _, err := many.Generate(t.Context(), photon.Text("x"), photon.WithMaxTokens(2)); err != nil {
		t.Fatal(err)
	}
	equal(t, "still running", drained.numRunning(), 1)
	if _, err := old.Collect(); err != nil {
		t.Fatal(err)
	}
	equal(t, "tokens", old.Usage().OutputTokens, 3000)
}

func TestLiveHedgeLeavesNothingOnTheReplicaThatLost(t *testing.T) {
	replicas := twoReplicas(t, "0.2")
	reached := map[string]bool{}
	client := connect(t, fmt.Sprintf("ipv4:%s,%s", replicas[0].address, replicas[1].address),
		photon.WithDialOptions(grpc.WithUnaryInterceptor(func(
			ctx context.Context, method string, q, a any, conn *grpc.ClientConn, next grpc.UnaryInvoker, options ...grpc.CallOption,
		) error {
			var server peer.Peer
			err := next(ctx, method, q, a, conn, append(options, grpc.Peer(&server))...)
			if err == nil && len(reached) < 2 {
				reached[server.Addr.String()] = true
			}
			return err
		})))
	eventually(t, "both are reached", func() bool {
		if _, err := client.Generate(t.Context(), photon.Text("x"), photon.WithMaxTokens(1)); err != nil {
			t.Fatal(err)
		}
		return len(reached) == 2
	})
	// Each in turn answers nothing any more, without having ended.
	for _, frozen := range replicas {
		syscall.Kill(-frozen.command.Process.Pid, syscall.SIGSTOP)
		for range 2 {
			result, err := client.Generate(t.Context(), photon.Text("x"), photon.WithMaxTokens(500), photon.WithIgnoreEOS(true), photon.WithHedgeAfter(100*time.Millisecond))
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "tokens", result.Usage.OutputTokens, 500)
		}
		syscall.Kill(-frozen.command.Process.Pid, syscall.SIGCONT)
	}
	for _, r := range replicas {
		eventually(t, "nothing runs", func() bool { return r.numRunning() == 0 })
	}
}
