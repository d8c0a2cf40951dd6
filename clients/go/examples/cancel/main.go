// Three ways to end a generation early; each frees what it holds on the server at its next step.
//
//	go run ./examples/cancel [TARGET]
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
)

func main() {
	client, err := photon.NewClient(target())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	leaveTheLoop(client)
	cancelTheContext(client)
	letTheDeadlinePass(client)
}

var endless = []photon.Option{photon.WithIgnoreEOS(true), photon.WithMaxTokens(3000)}

func leaveTheLoop(client *photon.Client) {
	num := 0
	for _, err := range client.Stream(context.Background(), photon.Text("import "), endless...).All() {
		if err != nil {
			log.Fatal(err)
		}
		if num++; num == 3 {
			break
		}
	}
	fmt.Printf("left after %d messages\n", num)
}

func cancelTheContext(client *photon.Client) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for _, err := range client.Stream(ctx, photon.Text("import "), endless...).All() {
		if err != nil {
			fmt.Println("cancelled:", errors.Is(err, context.Canceled))
		}
		cancel()
	}
}

func letTheDeadlinePass(client *photon.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	_, err := client.Generate(ctx, photon.Text("import "), endless...)
	fmt.Println("out of time:", errors.Is(err, context.DeadlineExceeded))
}

func target() string {
	if len(os.Args) > 1 {
		return os.Args[1]
	}
	return "127.0.0.1:50051"
}
