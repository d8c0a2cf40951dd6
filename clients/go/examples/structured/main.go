// A typed message instead of text: whole, and as it is filled.
//
//	go run ./examples/structured [TARGET]
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/photon-grpc/photon-grpc/clients/go/examples/acmev1"
	"github.com/photon-grpc/photon-grpc/clients/go/photon"
)

func main() {
	client, err := photon.NewClient(target())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx := context.Background()
	prompt := photon.Text("invoice_17 = ") // the embedded model knows Python, and no invoices

	invoice, err := photon.GenerateAs[*acmev1.Invoice](ctx, client, prompt, photon.WithMaxTokens(400), photon.WithSeed(3))
	if errors.Is(err, photon.MessageMismatch) {
		fmt.Println("cut:", err)
	} else if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("invoice %q, %d items\n", invoice.GetNumber(), len(invoice.GetItems()))

	last := ""
	for partial, err := range photon.StreamAs[*acmev1.Invoice](ctx, client, prompt, photon.WithMaxTokens(400), photon.WithSeed(3)) {
		if err != nil {
			log.Fatal(err)
		}
		// Text that completes no value yet leaves the message as it was.
		if now := fmt.Sprint(partial); now != last {
			fmt.Println("so far:", now)
			last = now
		}
	}

	choice, err := client.Generate(ctx, photon.Text("A prime number: "), photon.WithChoices("4", "7", "9"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("one of three:", choice.Text)
}

func target() string {
	if len(os.Args) > 1 {
		return os.Args[1]
	}
	return "127.0.0.1:50051"
}
