// Many requests on one stream: the server batches them. One that is refused does not disturb the others.
//
//	go run ./examples/multiplex [TARGET]
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"sync"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
)

var prompts = []string{"import os\n", "def main():", "class Node:", "for i in range(", "try:\n", "return sorted(", ""}

func main() {
	client, err := photon.NewClient(target())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	many := client.Multiplex(context.Background())
	defer many.Close()

	var wait sync.WaitGroup
	lines := make([]string, len(prompts))
	for i, prompt := range prompts {
		wait.Go(func() { lines[i] = complete(many, prompt) })
	}
	wait.Wait()
	for _, line := range lines {
		fmt.Println(line)
	}
}

func complete(caller photon.Caller, prompt string) string {
	result, err := caller.Generate(context.Background(), photon.Text(prompt), photon.WithMaxTokens(16), photon.WithTemperature(0))
	if failure := (*photon.Error)(nil); errors.As(err, &failure) {
		return fmt.Sprintf("%q: refused, %s: %s", prompt, failure.Reason, failure.Message)
	}
	return fmt.Sprintf("%q -> %q", prompt, result.Text)
}

func target() string {
	if len(os.Args) > 1 {
		return os.Args[1]
	}
	return "127.0.0.1:50051"
}
