// Text as it is produced. A stream that is cut by a restart goes on where it was.
//
//	go run ./examples/stream [TARGET]
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
	stream := client.Stream(context.Background(), photon.Text("class Stack:"),
		photon.WithMaxTokens(64), photon.WithTemperature(0.7), photon.WithSeed(1), photon.WithStopStrings("\nclass "))
	for delta, err := range stream.All() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(delta.Text)
		if delta.Finish != nil {
			fmt.Printf("\n-- %s, %d tokens in %s\n", delta.Finish.Reason, stream.Usage().OutputTokens, stream.Timing().Total)
		}
	}
}

func target() string {
	if len(os.Args) > 1 {
		return os.Args[1]
	}
	return "127.0.0.1:50051"
}
