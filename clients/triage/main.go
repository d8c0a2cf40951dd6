// A caller with the stubs that protoc made of triage.proto, and nothing of photon_grpc.
//
//	go run . [TARGET]
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"triage/acmev1"
)

func main() {
	target := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	connection, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	service := acmev1.NewTriageServiceClient(connection)
	ticket := &acmev1.Ticket{Subject: "It leaks", Body: "There is water under the machine.", Email: "a@example.com"}
	verdict, err := service.Triage(ctx, ticket)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%v, severity %d: %s\n", verdict.Team, verdict.Severity, verdict.Summary)

	steps, err := service.Plan(ctx, ticket)
	if err != nil {
		log.Fatal(err)
	}
	for {
		step, err := steps.Recv()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("- %s (%d minutes)\n", step.Action, step.Minutes)
	}
}
