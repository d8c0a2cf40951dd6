// What the client costs beside the generated stubs: CPU for each token, latency, memory of open streams. The server is a
// process of its own and has no model.
//
//	go run ./internal/measure
package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

const (
	tokensOfACase = 100_000
	rounds        = 3
	calls         = 1500
	openStreams   = 1000
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "serve" {
		serve()
		return
	}
	address, stop := startServer()
	defer stop()
	measured := newSources(address)
	fmt.Printf("%d CPUs, %s, %s/%s\n", runtime.NumCPU(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	printTokens(measured)
	printLatency(address)
	printMemory(address)
}

// source opens a stream and gives what reads its next message.
type source struct {
	name string
	open func(numTokens int, isHeld bool) (recv func() error)
}

// read reads a stream to its end.
func (s source) read(numTokens int) {
	recv := s.open(numTokens, false)
	for {
		if err := recv(); err == io.EOF {
			return
		} else if err != nil {
			panic(err)
		}
	}
}

func newSources(address string) []source {
	client := must(photon.NewClient(address))
	plain := must(photon.NewClient(address, photon.WithoutResume()))
	many := client.Multiplex(context.Background())
	return []source{
		{"generated stubs", stubs(address)},
		{"client, without resume", streams(plain)},
		{"client", streams(client)},
		{"multiplexed", streams(many)},
	}
}

func stubs(address string) func(int, bool) func() error {
	conn := must(grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials())))
	stub := pb.NewInferenceServiceClient(conn)
	return func(numTokens int, isHeld bool) func() error {
		request := &pb.GenerateRequest{
			Input: &pb.GenerateRequest_Text{Text: "x"},
			Stop:  &pb.StopParams{MaxTokens: proto.Uint32(uint32(numTokens))},
		}
		if isHeld {
			request.Stop.MaxDuration = durationpb.New(time.Hour)
		}
		stream := must(stub.StreamGenerate(context.Background(), request))
		return func() error {
			_, err := stream.Recv()
			return err
		}
	}
}

func streams(caller photon.Caller) func(int, bool) func() error {
	return func(numTokens int, isHeld bool) func() error {
		options := []photon.Option{photon.WithMaxTokens(numTokens)}
		if isHeld {
			options = append(options, photon.WithMaxDuration(time.Hour))
		}
		stream := caller.Stream(context.Background(), photon.Text("x"), options...)
		return func() error {
			_, err := stream.Recv()
			return err
		}
	}
}

func printTokens(sources []source) {
	fmt.Print("\n| thousand tokens/s (µs of the client's CPU for each token) | 1 stream | 64 | 256 |\n|---|---|---|---|\n")
	for _, each := range sources {
		fmt.Printf("| %s |", each.name)
		for _, num := range []int{1, 64, 256} {
			best := 0.0
			cpu := time.Duration(1<<63 - 1)
			for range rounds {
				seconds, used := load(each, num)
				best = max(best, float64(tokensOfACase)/seconds)
				cpu = min(cpu, used)
			}
			fmt.Printf(" %.0f (%.1f) |", best/1e3, float64(cpu.Nanoseconds())/1e3/tokensOfACase)
		}
		fmt.Println()
	}
}

// load gives the seconds and the processor time that streams at the same time take.
func load(from source, num int) (float64, time.Duration) {
	before, began := processorTime(), time.Now()
	var wait sync.WaitGroup
	for range num {
		wait.Go(func() { from.read(tokensOfACase / num) })
	}
	wait.Wait()
	return time.Since(began).Seconds(), processorTime() - before
}

// printLatency asks in turn, so that what else the machine does meets all alike.
func printLatency(address string) {
	client := must(photon.NewClient(address))
	conn := must(grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials())))
	stub := pb.NewInferenceServiceClient(conn)
	request := &pb.GenerateRequest{Input: &pb.GenerateRequest_Text{Text: "x"}, Stop: &pb.StopParams{MaxTokens: proto.Uint32(1)}}
	first, ours := source{open: stubs(address)}, source{open: streams(client)}
	asked := []func(){
		func() { must(stub.Generate(context.Background(), request)) },
		func() { must(client.Generate(context.Background(), photon.Text("x"), photon.WithMaxTokens(1))) },
		func() { first.read(1) },
		func() { ours.read(1) },
	}
	taken := make([][]time.Duration, len(asked))
	for range calls {
		for i, ask := range asked {
			began := time.Now()
			ask()
			taken[i] = append(taken[i], time.Since(began))
		}
	}
	fmt.Print("\n| p50 (p90), µs | generated stubs | client |\n|---|---|---|\n")
	for i, name := range []string{"Generate", "a stream of one token"} {
		fmt.Printf("| %s | %s | %s |\n", name, quantiles(taken[2*i]), quantiles(taken[2*i+1]))
	}
}

func quantiles(taken []time.Duration) string {
	slices.Sort(taken)
	return fmt.Sprintf("%d (%d)", taken[len(taken)/2].Microseconds(), taken[len(taken)*9/10].Microseconds())
}

func printMemory(address string) {
	fmt.Printf("\n| %d open streams | KiB each |\n|---|---|\n", openStreams)
	for _, each := range newSources(address) {
		each.read(1)
		before := inUse()
		held := make([]func() error, openStreams)
		var wait sync.WaitGroup
		for i := range held {
			wait.Go(func() {
				held[i] = each.open(10, true)
				check(held[i]())
			})
		}
		wait.Wait()
		fmt.Printf("| %s | %.1f |\n", each.name, float64(inUse()-before)/1024/openStreams)
		runtime.KeepAlive(held)
	}
}

// inUse is the memory of heap and stacks that is held.
func inUse() uint64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc + stats.StackInuse
}

func processorTime() time.Duration {
	var used syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

func startServer() (string, func()) {
	command := exec.Command(os.Args[0], "serve")
	out := must(command.StdoutPipe())
	check(command.Start())
	address := must(bufio.NewReader(out).ReadString('\n'))
	return strings.TrimSpace(address), func() { command.Process.Kill() }
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
