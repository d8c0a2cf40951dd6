package photon

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	_ "embed" // for the service config
	"encoding/json"
	"fmt"
	"math"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // asks replicas whether they are ready, as the service config says
	"google.golang.org/grpc/keepalive"
)

// What is retried, where calls go and whose health is asked: a copy of clients/service_config.json, the same in every
// language.
//
//go:embed service_config.json
var serviceConfig []byte

const (
	// DefaultTimeout is the deadline of a call whose context has none.
	DefaultTimeout = 600 * time.Second
	// A request larger than this is sent once; gRPC's 256 KiB is less than a long prompt.
	retryBufferBytes = 4 << 20
)

// In step with the server, which accepts a ping every 10 s: a silent drop is noticed within 18 s.
var pings = keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 8 * time.Second}

// A server that is starting is found soon after it listens.
var reconnect = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
	MinConnectTimeout: 5 * time.Second,
}

type settings struct {
	credentials   credentials.TransportCredentials
	timeout       time.Duration
	resumeTimeout time.Duration
	retries       bool
	dialOptions   []grpc.DialOption
}

// ClientOption sets how a Client connects and calls.
type ClientOption func(*settings)

// WithTLS encrypts the connection. nil: with the system's authorities. With Certificates in it, the server knows who
// asks (mTLS). See TLSFromFiles.
func WithTLS(config *tls.Config) ClientOption {
	return func(s *settings) { s.credentials = credentials.NewTLS(config) }
}

// WithAPIKey sends the key with every call. Over clear text everyone on the way can read it: use it with WithTLS, or on
// a Unix socket.
func WithAPIKey(key string) ClientOption {
	return WithDialOptions(grpc.WithPerRPCCredentials(apiKey(key)))
}

// WithDefaultTimeout changes DefaultTimeout; at most 0: none.
func WithDefaultTimeout(limit time.Duration) ClientOption {
	return func(s *settings) { s.timeout = limit }
}

// WithoutRetries sends each call once.
func WithoutRetries() ClientOption { return func(s *settings) { s.retries = false } }

// WithoutResume ends a stream with the error that cut it, where it would be continued on another replica.
func WithoutResume() ClientOption { return WithResumeTimeout(0) }

// WithResumeTimeout changes how long a stream that was cut looks for a replica that goes on: 60 s.
func WithResumeTimeout(limit time.Duration) ClientOption {
	return func(s *settings) { s.resumeTimeout = limit }
}

// WithDialOptions is for what has no option here: interceptors, stats handlers, dialers.
func WithDialOptions(options ...grpc.DialOption) ClientOption {
	return func(s *settings) { s.dialOptions = append(s.dialOptions, options...) }
}

// TLSFromFiles reads PEM files: the authority of the server (empty: the system's), and, for mTLS, the client's own
// certificate and key (both empty: none).
func TLSFromFiles(authority, certificate, key string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if authority != "" {
		pem, err := os.ReadFile(authority)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s: no certificate in it", authority)
		}
	}
	if certificate != "" || key != "" {
		own, err := tls.LoadX509KeyPair(certificate, key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{own}
	}
	return config, nil
}

type apiKey string

func (k apiKey) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(k)}, nil
}

func (apiKey) RequireTransportSecurity() bool { return false }

func newSettings(options []ClientOption) *settings {
	s := &settings{
		credentials:   insecure.NewCredentials(),
		timeout:       DefaultTimeout,
		resumeTimeout: defaultResumeTimeout,
		retries:       true,
	}
	for _, option := range options {
		option(s)
	}
	return s
}

func (s *settings) dial(target string, more ...grpc.DialOption) (*grpc.ClientConn, error) {
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(s.credentials),
		grpc.WithDefaultServiceConfig(apartServiceConfig()),
		grpc.WithKeepaliveParams(pings),
		grpc.WithConnectParams(reconnect),
		grpc.WithResolvers(addressList("ipv4"), addressList("ipv6")),
		// The server says what it accepts; what it sends is what was asked for.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxRetryRPCBufferSize(retryBufferBytes)),
	}
	if !s.retries {
		options = append(options, grpc.WithDisableRetry())
	}
	return grpc.NewClient(target, append(append(options, more...), s.dialOptions...)...)
}

// apartServiceConfig is the service config with round_robin as replicas.go has it.
func apartServiceConfig() string {
	var config map[string]any
	if err := json.Unmarshal(serviceConfig, &config); err != nil {
		panic(err) // The embedded file is tested.
	}
	config["loadBalancingConfig"] = []map[string]any{{apartPolicy: map[string]any{}}}
	text, err := json.Marshal(config)
	if err != nil {
		panic(err)
	}
	return string(text)
}
