// A conversation: messages in, the answer appended, the next question after it.
//
//	go run ./examples/chat [TARGET]
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
	chat := photon.Chat{{Role: "system", Content: "You complete Python code."}}
	for _, question := range []string{"def add(a, b):", "def is_even(n):"} {
		chat = append(chat, photon.Message{Role: "user", Content: question})
		fmt.Printf("user: %s\nassistant: ", question)
		answer := ""
		for delta, err := range client.Stream(context.Background(), chat, photon.WithMaxTokens(24), photon.WithTemperature(0)).All() {
			if err != nil {
				log.Fatal(err)
			}
			fmt.Print(delta.Text)
			answer += delta.Text
		}
		chat = append(chat, photon.Message{Role: "assistant", Content: answer})
		fmt.Println()
	}
}

func target() string {
	if len(os.Args) > 1 {
		return os.Args[1]
	}
	return "127.0.0.1:50051"
}
