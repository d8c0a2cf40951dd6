// One whole generation: what came back, why it ended, what it cost.
//
//	go run ./examples/generate [TARGET]
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
)

func main() {
	client, err := photon.NewClient(target())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	result, err := client.Generate(context.Background(), photon.Text("def fib(n):"),
		photon.WithMaxTokens(48), photon.WithTemperature(0), photon.WithLogprobs(2))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.Text)
	fmt.Printf("-- %s: %d tokens, ended by %s\n", result.Model, result.Usage.OutputTokens, result.Finish.Reason)
	fmt.Printf("-- first token after %s, seed %d\n", result.Timing.FirstToken, result.Seed)
	for _, score := range result.Scores[:3] {
		fmt.Printf("-- %q: %.2f, then %q\n", score.Bytes, score.Logprob, score.Candidates[1].Bytes)
	}
}

func target() string {
	if len(os.Args) > 1 {
		return os.Args[1]
	}
	return "127.0.0.1:50051"
}
