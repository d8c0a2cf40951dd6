package photon_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/photon-grpc/photon-grpc/clients/go/photon"
	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

func TestTheServiceConfigIsTheRepositorys(t *testing.T) {
	want, err := os.ReadFile("../../service_config.json")
	if err != nil {
		t.Skip("not within the repository")
	}
	got, err := os.ReadFile("service_config.json")
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "service_config.json", string(got), string(want))
}

func failing(times int, err error) func(*pb.GenerateRequest, int) error {
	var calls atomic.Int32
	return func(*pb.GenerateRequest, int) error {
		if int(calls.Add(1)) <= times {
			return err
		}
		return nil
	}
}

func TestACallThatFailsBeforeItsAnswerIsSentAgain(t *testing.T) {
	for _, source := range sources {
		for _, code := range []codes.Code{codes.Unavailable, codes.ResourceExhausted, codes.Canceled} {
			t.Run(source.name+code.String(), func(t *testing.T) {
				t.Parallel()
				f := newFake(t)
				f.before = failing(2, status.Error(code, "not now"))
				result, err := source.open(t, newClient(t, nil, f)).Generate(t.Context(), photon.Text("x"))
				if err != nil {
					t.Fatal(err)
				}
				equal(t, "text", result.Text, fakeText(drawnSeed, 20))
				equal(t, "calls", len(f.seen()), 3)
			})
		}
	}
}

func TestACallIsSentFiveTimesAtMostAndWithoutRetriesOnce(t *testing.T) {
	for _, source := range sources {
		for want, options := range map[int][]photon.ClientOption{5: nil, 1: {photon.WithoutRetries()}} {
			t.Run(source.name, func(t *testing.T) {
				t.Parallel()
				f := newFake(t)
				f.before = failing(100, failure(codes.Unavailable, photon.EngineRestarting, nil,
					&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)}))
				_, err := source.open(t, newClient(t, options, f)).Generate(t.Context(), photon.Text("x"))
				if !errors.Is(err, photon.EngineRestarting) {
					t.Fatal(err)
				}
				equal(t, "calls", len(f.seen()), want)
			})
		}
	}
}

func TestAnErrorHasCodeReasonFieldsNumbersAndTime(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			f := newFake(t)
			f.before = failing(1, failure(codes.InvalidArgument, photon.PromptTooLong, map[string]string{"needed": "5000", "limit": "4096"},
				&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "stop.max_tokens", Description: "too many"}}},
				&errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)}))
			_, err := source.open(t, newClient(t, nil, f)).Generate(t.Context(), photon.Text("x"))
			var failed *photon.Error
			if !errors.As(err, &failed) || !errors.Is(err, photon.PromptTooLong) || !errors.Is(err, photon.InvalidRequest) {
				t.Fatal(err)
			}
			if errors.Is(err, photon.Overloaded) || errors.Is(err, photon.Unavailable) || errors.Is(err, context.Canceled) {
				t.Error("is what it is not")
			}
			equal(t, "code", failed.Code, codes.InvalidArgument)
			equal(t, "of the status", status.Code(err), codes.InvalidArgument)
			equal(t, "needed", failed.Needed, 5000)
			equal(t, "limit", failed.Limit, 4096)
			equal(t, "time", failed.RetryAfter, 1500*time.Millisecond)
			equal(t, "field", failed.Violations[0], photon.FieldViolation{Field: "stop.max_tokens", Description: "too many"})
		})
	}
}

func TestNumbersOfAnErrorKeepTheirFractions(t *testing.T) {
	for _, each := range []struct {
		sent  string
		whole int64
		value float64
	}{
		{"-1.5", -1, -1.5},
		{"2.0", 2, 2},
		{"9007199254740993", 9007199254740993, 9007199254740992},
		// More than an int64 holds.
		{"18446744073709551615", 0, 18446744073709551615},
		{"many", 0, 0},
		{"inf", 0, 0},
	} {
		t.Run(each.sent, func(t *testing.T) {
			f := newFake(t)
			f.before = failing(1, failure(codes.InvalidArgument, photon.InvalidRequest,
				map[string]string{"needed": each.sent, "limit": each.sent, "field": "sampling.temperature"}))
			_, err := newClient(t, nil, f).Generate(t.Context(), photon.Text("x"))
			var failed *photon.Error
			if !errors.As(err, &failed) {
				t.Fatal(err)
			}
			equal(t, "needed", failed.Needed, each.whole)
			equal(t, "limit", failed.Limit, each.whole)
			equal(t, "needed with its fraction", failed.NeededValue, each.value)
			equal(t, "limit with its fraction", failed.LimitValue, each.value)
			// Where the server names the field only beside the reason.
			equal(t, "field", failed.Violations[0], photon.FieldViolation{Field: "sampling.temperature"})
		})
	}
}

func TestADeadlineThatCannotBeMetIsOneThatPassed(t *testing.T) {
	for _, source := range sources {
		t.Run(source.name, func(t *testing.T) {
			f := newFake(t)
			f.before = failing(1, failure(codes.DeadlineExceeded, photon.DeadlineUnreachable, nil))
			_, err := source.open(t, newClient(t, nil, f)).Generate(t.Context(), photon.Text("x"))
			for _, target := range []error{context.DeadlineExceeded, photon.DeadlinePassed, photon.DeadlineUnreachable} {
				if !errors.Is(err, target) {
					t.Errorf("%v is no %v", err, target)
				}
			}
		})
	}
}

func TestAWordOfANewerServerIsKeptAndMeansWhatItsCodeMeans(t *testing.T) {
	f := newFake(t)
	f.before = failing(1, failure(codes.InvalidArgument, "TOO_POLITE", nil))
	_, err := newClient(t, nil, f).Generate(t.Context(), photon.Text("x"))
	var failed *photon.Error
	if !errors.As(err, &failed) || !errors.Is(err, photon.InvalidRequest) || errors.Is(err, photon.PromptTooLong) {
		t.Fatal(err)
	}
	equal(t, "reason", failed.Reason, "TOO_POLITE")
}

func TestANegativePushbackForbidsToAskAgain(t *testing.T) {
	f := newFake(t, grpc.UnaryInterceptor(func(ctx context.Context, q any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		answer, err := handle(ctx, q)
		grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", "-1"))
		return answer, err
	}))
	f.before = failing(100, failure(codes.ResourceExhausted, photon.QuotaExceeded, nil))
	_, err := newClient(t, nil, f).Generate(t.Context(), photon.Text("x"))
	var failed *photon.Error
	if !errors.As(err, &failed) || !errors.Is(err, photon.Overloaded) {
		t.Fatal(err)
	}
	if failed.RetryAfter >= 0 {
		t.Error(failed.RetryAfter)
	}
	equal(t, "calls", len(f.seen()), 1)
}

func TestNoServerIsUnreachable(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	listener.Close()
	client := connect(t, listener.Addr().String())
	if _, err := client.Generate(t.Context(), photon.Text("x")); !errors.Is(err, photon.Unreachable) {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := client.WaitUntilReady(ctx); !errors.Is(err, photon.Unavailable) {
		t.Error(err)
	}
	client.Close()
	if _, err := client.Generate(t.Context(), photon.Text("x")); !errors.Is(err, photon.Closed) {
		t.Error(err)
	}
}

func TestEveryCallHasADeadlineAndTheCallersCounts(t *testing.T) {
	for _, source := range sources[:1] {
		f := newFake(t)
		caller := source.open(t, newClient(t, nil, f))
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		for i, call := range []struct {
			ctx     context.Context
			options []photon.Option
			want    time.Duration
		}{
			{t.Context(), nil, photon.DefaultTimeout},
			{ctx, nil, time.Hour},
			{t.Context(), []photon.Option{photon.WithTimeout(time.Minute)}, time.Minute},
			{ctx, []photon.Option{photon.WithTimeout(2 * time.Hour)}, time.Hour},
		} {
			if _, err := caller.Stream(call.ctx, photon.Text("x"), call.options...).Collect(); err != nil {
				t.Fatal(err)
			}
			if left := f.deadlines[i]; left > call.want || left < call.want-10*time.Second {
				t.Errorf("call %d: %s, not %s", i, left, call.want)
			}
		}
	}
}

func TestADeadlineIsToldInOurWords(t *testing.T) {
	for _, source := range sources {
		f := newFake(t)
		f.pause = time.Hour
		caller := source.open(t, newClient(t, nil, f))
		_, err := caller.Generate(t.Context(), photon.Text("x"), photon.WithTimeout(100*time.Millisecond))
		var failure *photon.Error
		if !errors.As(err, &failure) || failure.Message != "the deadline has passed" {
			t.Error(source.name, err)
		}
	}
}

func TestAStreamThatIsLeftIsCancelledOnTheServer(t *testing.T) {
	for _, source := range sources {
		for name, leave := range map[string]func(context.CancelFunc, *photon.Stream){
			"close":  func(_ context.CancelFunc, stream *photon.Stream) { stream.Close() },
			"cancel": func(cancel context.CancelFunc, _ *photon.Stream) { cancel() },
			"break": func(_ context.CancelFunc, stream *photon.Stream) {
				for range stream.All() {
					break
				}
			},
		} {
			t.Run(source.name+name, func(t *testing.T) {
				f := newFake(t)
				f.pause = 10 * time.Millisecond
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				stream := source.open(t, newClient(t, nil, f)).Stream(ctx, photon.Text("x"), photon.WithMaxTokens(100000))
				if _, err := stream.Recv(); err != nil {
					t.Fatal(err)
				}
				leave(cancel, stream)
				eventually(t, "cancelled", func() bool { return len(f.cancels()) == 1 })
				for {
					if _, err := stream.Recv(); err != nil {
						if !errors.Is(err, context.Canceled) || !errors.Is(err, photon.Cancelled) {
							t.Error(err)
						}
						break
					}
				}
			})
		}
	}
}

func TestTheFirstAnswerOfAHedgedCallWinsAndTheOtherIsCancelled(t *testing.T) {
	slow, fast := newFake(t), newFake(t)
	slow.pause = time.Second
	client := newClient(t, nil, slow, fast)
	connectToAll(t, client, slow, fast)
	numSlow, numFast := len(slow.seen()), len(fast.seen())
	const calls = 20
	for range calls {
		// Whichever replica comes first, the fast one answers.
		result, err := client.Generate(t.Context(), photon.Text("x"), photon.WithHedgeAfter(5*time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "text", result.Text, fakeText(drawnSeed, 20))
	}
	equal(t, "asked", len(fast.seen())-numFast, calls)
	asked := len(slow.seen()) - numSlow
	if asked < calls/4 {
		t.Error("the slow one was hardly asked")
	}
	eventually(t, "cancelled", func() bool {
		num := 0
		for _, err := range slow.cancels() {
			if err == context.Canceled {
				num++
			}
		}
		return num >= asked
	})
}

func TestAHedgedCallThatFailsIsSentToTheOtherAtOnce(t *testing.T) {
	bad, good := newFake(t), newFake(t)
	bad.before = failing(1000, failure(codes.ResourceExhausted, photon.QueueFull, nil))
	client := newClient(t, []photon.ClientOption{photon.WithoutRetries()}, bad, good)
	connectToAll(t, client, bad, good)
	numBad := len(bad.seen())
	for range 4 {
		if _, err := client.Generate(t.Context(), photon.Text("x"), photon.WithHedgeAfter(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	if len(bad.seen())-numBad < 2 {
		t.Error("the bad one was hardly asked")
	}
}

func TestARefusedHedgedCallIsNotSentTwice(t *testing.T) {
	f := newFake(t)
	f.before = failing(1000, failure(codes.InvalidArgument, photon.InvalidRequest, nil))
	_, err := newClient(t, nil, f).Generate(t.Context(), photon.Text("x"), photon.WithHedgeAfter(time.Hour))
	if !errors.Is(err, photon.InvalidRequest) {
		t.Fatal(err)
	}
	equal(t, "calls", len(f.seen()), 1)
}

// connectToAll returns when calls reach each of the replicas.
func connectToAll(t *testing.T, client *photon.Client, replicas ...*fake) {
	t.Helper()
	for _, replica := range replicas {
		eventually(t, "reached", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			client.Generate(ctx, photon.Text("x"))
			return len(replica.seen()) > 0
		})
	}
}

func TestCallsTakeTurnsAmongReplicasThatAreReady(t *testing.T) {
	first, second := newFake(t), newFake(t)
	client := newClient(t, nil, first, second)
	generate := func(n int) {
		t.Helper()
		for range n {
			if _, err := client.Generate(t.Context(), photon.Text("x")); err != nil {
				t.Fatal(err)
			}
		}
	}
	connectToAll(t, client, first, second)
	one, other := len(first.seen()), len(second.seen())
	generate(10)
	equal(t, "the first", len(first.seen())-one, 5)
	equal(t, "the second", len(second.seen())-other, 5)
	first.health.SetServingStatus("photon_grpc.v1.InferenceService", healthpb.HealthCheckResponse_NOT_SERVING)
	eventually(t, "the first is left alone", func() bool {
		before := len(first.seen())
		generate(4)
		return len(first.seen()) == before
	})
}

func TestAKeyAndMetadataGoWithTheCall(t *testing.T) {
	f := newFake(t)
	client := newClient(t, []photon.ClientOption{photon.WithAPIKey("secret")}, f)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "x-request-id", "seven")
	if _, err := client.Stream(ctx, photon.Text("x")).Collect(); err != nil {
		t.Fatal(err)
	}
	equal(t, "authorization", f.metadata[0].Get("authorization")[0], "Bearer secret")
	equal(t, "x-request-id", f.metadata[0].Get("x-request-id")[0], "seven")
}

func TestAUnixSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "photon.sock")
	listenFake(t, "unix", path)
	if _, err := connect(t, "unix:"+path).Generate(t.Context(), photon.Text("x")); err != nil {
		t.Fatal(err)
	}
}

func TestANameIsResolved(t *testing.T) {
	f := newFake(t)
	_, port, _ := net.SplitHostPort(f.address)
	if _, err := connect(t, "dns:///localhost:"+port).Generate(t.Context(), photon.Text("x")); err != nil {
		t.Fatal(err)
	}
}

// authority is a certificate that signs others, in files of a directory.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.sign("ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true})
	return a
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

func (a *authority) sign(name string, cert *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	cert.SerialNumber, cert.Subject = big.NewInt(time.Now().UnixNano()), pkix.Name{CommonName: name}
	cert.NotBefore, cert.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = cert, key
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	inKey, _ := x509.MarshalECPrivateKey(key)
	a.write(name+".pem", "CERTIFICATE", der)
	a.write(name+".key", "EC PRIVATE KEY", inKey)
	made, _ := x509.ParseCertificate(der)
	return made, key
}

func (a *authority) write(name, kind string, der []byte) {
	var text bytes.Buffer
	pem.Encode(&text, &pem.Block{Type: kind, Bytes: der})
	if err := os.WriteFile(a.path(name), text.Bytes(), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

func TestTLSAndMutualTLS(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	a.sign("server", &x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}})
	a.sign("me", &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	own, err := tls.LoadX509KeyPair(a.path("server.pem"), a.path("server.key"))
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	plain := newFake(t, grpc.Creds(credentials.NewServerTLSFromCert(&own)))
	mutual := newFake(t, grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{own}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
	})))
	for _, try := range []struct {
		f         *fake
		files     [3]string
		isRefused bool
	}{
		{plain, [3]string{a.path("ca.pem")}, false},
		{mutual, [3]string{a.path("ca.pem"), a.path("me.pem"), a.path("me.key")}, false},
		{mutual, [3]string{a.path("ca.pem")}, true},
		{plain, [3]string{}, true},
	} {
		config, err := photon.TLSFromFiles(try.files[0], try.files[1], try.files[2])
		if err != nil {
			t.Fatal(err)
		}
		client := newClient(t, []photon.ClientOption{photon.WithTLS(config)}, try.f)
		_, err = client.Generate(t.Context(), photon.Text("x"))
		if try.isRefused != errors.Is(err, photon.Unreachable) || !try.isRefused && err != nil {
			t.Errorf("%v: %v", try.files, err)
		}
	}
	if _, err := photon.TLSFromFiles(a.path("ca.key"), "", ""); err == nil || !strings.Contains(err.Error(), "no certificate") {
		t.Error(err)
	}
}

func TestAMistakeInAnOptionIsTheServersError(t *testing.T) {
	client := connect(t, "127.0.0.1:1")
	for field, options := range map[string][]photon.Option{
		"stop.max_tokens":               {photon.WithMaxTokens(-1)},
		"chat.tools_json":               {photon.WithToolsJSON("[]")},
		"structured_output.regex":       {photon.WithChoices("a"), photon.WithRegex("b")},
		"structured_output.json_schema": {photon.WithJSONSchema(func() {})},
	} {
		_, err := client.Generate(t.Context(), photon.Text("x"), options...)
		var failed *photon.Error
		if !errors.As(err, &failed) || failed.Reason != photon.InvalidRequest || failed.Violations[0].Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	if _, err := client.Stream(t.Context(), photon.Text("x"), photon.WithHedgeAfter(0)).Recv(); !errors.Is(err, photon.InvalidRequest) {
		t.Error(err)
	}
}
