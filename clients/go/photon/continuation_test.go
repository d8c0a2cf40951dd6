package photon_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

// The rule of all clients, by example.
func TestAStreamTellsWhetherItsContinuationIsBitExact(t *testing.T) {
	text, err := os.ReadFile("../../continuations.json")
	if err != nil {
		t.Skip("outside the repository: ", err)
	}
	var cases []struct {
		Before, After string
		BitExact      bool `json:"bit_exact"`
	}
	if err := json.Unmarshal(text, &cases); err != nil || len(cases) == 0 {
		t.Fatal(err, cases)
	}
	defer slog.SetDefault(slog.Default())
	for _, each := range cases {
		for _, source := range sources {
			t.Run(source.name+" "+each.Before+" "+each.After, func(t *testing.T) {
				var lines bytes.Buffer
				slog.SetDefault(slog.New(slog.NewTextHandler(&lines, nil)))
				f := newFake(t)
				f.before = cutOnce(3)
				f.numerics = func(request *pb.GenerateRequest) string {
					if request.ContinueFrom == nil {
						return each.Before
					}
					return each.After
				}
				whole, err := source.open(t, newClient(t, nil, f)).Stream(t.Context(), photon.Text("x"), photon.WithMaxTokens(6)).Collect()
				if err != nil {
					t.Fatal(err)
				}
				equal(t, "bit-exact", whole.IsBitExact, each.BitExact)
				equal(t, "version of the first", whole.NumericsVersion, each.Before)
				equal(t, "lines", strings.Count(lines.String(), "other numerics"), map[bool]int{true: 0, false: 1}[each.BitExact])
			})
		}
	}
}

func TestAnUncutStreamIsBitExact(t *testing.T) {
	caller := newClient(t, nil, newFake(t))
	whole, err := caller.Generate(t.Context(), photon.Text("x"))
	if err != nil {
		t.Fatal(err)
	}
	stream := caller.Stream(t.Context(), photon.Text("x"))
	if _, err := stream.Collect(); err != nil {
		t.Fatal(err)
	}
	equal(t, "unary", whole.IsBitExact, true)
	equal(t, "stream", stream.IsBitExact(), true)
}
