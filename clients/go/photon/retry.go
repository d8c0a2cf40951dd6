package photon

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
)

// policy is the retryPolicy of the service config. gRPC obeys it for calls; here it is obeyed for what gRPC does not
// know: requests of a multiplexed stream, hedged attempts and resumptions.
var policy = readPolicy()

type retryPolicy struct {
	MaxAttempts          int
	InitialBackoff       string
	MaxBackoff           string
	BackoffMultiplier    float64
	RetryableStatusCodes []codes.Code

	first, longest time.Duration
}

func readPolicy() retryPolicy {
	var config struct {
		MethodConfig []struct{ RetryPolicy retryPolicy }
	}
	if err := json.Unmarshal(serviceConfig, &config); err != nil {
		panic(err) // The embedded file is tested.
	}
	p := config.MethodConfig[0].RetryPolicy
	p.first, _ = time.ParseDuration(p.InitialBackoff)
	p.longest, _ = time.ParseDuration(p.MaxBackoff)
	return p
}

// isRetryable reports whether asking again may help: the code is one of the policy's, the caller did not cancel and the
// server does not forbid it.
func isRetryable(err error) bool {
	var failure *Error
	if !errors.As(err, &failure) || failure.Reason == Cancelled || failure.Reason == Closed {
		return false
	}
	return failure.RetryAfter >= 0 && slices.Contains(policy.RetryableStatusCodes, failure.Code)
}

// pause waits before the next try: as long as the server says, else longer each time. Where there is to be none it gives
// why: err, or that the context has ended.
func pause(ctx context.Context, err error, tries int) error {
	if ctx.Err() != nil {
		return contextError(ctx)
	}
	if !isRetryable(err) {
		return err
	}
	return backOff(ctx, err, tries)
}

// backOff waits as pause does, whatever the failure.
func backOff(ctx context.Context, err error, tries int) error {
	var failure *Error
	errors.As(err, &failure)
	wait := failure.RetryAfter
	if wait == 0 {
		longest := math.Min(float64(policy.first)*math.Pow(policy.BackoffMultiplier, float64(tries)), float64(policy.longest))
		// gRPC's own jitter.
		wait = time.Duration(longest * (0.8 + 0.4*rand.Float64()))
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return contextError(ctx)
	}
}
