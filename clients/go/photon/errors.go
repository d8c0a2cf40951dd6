package photon

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

const (
	errorDomain = "photon-grpc"
	pushbackKey = "grpc-retry-pushback-ms"

	deadlineHasPassed = "the deadline has passed"
)

// Reason names a failure with the word that servers send. It is an error of its own, so that it can be looked for:
//
//	if errors.Is(err, photon.PromptTooLong) { … }
//
// Some have members: every QueueFull is an Overloaded, every PromptTooLong an InvalidRequest.
type Reason string

// The names are the same in every language.
const (
	// One request is refused or fails; the server goes on.
	RequestError        Reason = "REQUEST_ERROR"
	InvalidRequest      Reason = "INVALID_REQUEST"
	MalformedMessage    Reason = "MALFORMED_MESSAGE"
	PromptTooLong       Reason = "PROMPT_TOO_LONG"
	InvalidConstraint   Reason = "INVALID_CONSTRAINT"
	InvalidTemplate     Reason = "INVALID_TEMPLATE"
	ModelNotFound       Reason = "MODEL_NOT_FOUND"
	FeatureNotSupported Reason = "FEATURE_NOT_SUPPORTED"
	DuplicateRequestId  Reason = "DUPLICATE_REQUEST_ID"
	NotAllowed          Reason = "NOT_ALLOWED"
	MissingCredentials  Reason = "MISSING_CREDENTIALS"
	InvalidCredentials  Reason = "INVALID_CREDENTIALS"
	ScopeRequired       Reason = "SCOPE_REQUIRED"
	Overloaded          Reason = "OVERLOADED"
	QueueFull           Reason = "QUEUE_FULL"
	QueueTimeout        Reason = "QUEUE_TIMEOUT"
	QuotaExceeded       Reason = "QUOTA_EXCEEDED"
	KVCapacity          Reason = "KV_CAPACITY"
	// No replica has the descriptor set of a digest; the client sends the set itself then.
	DescriptorSetUnknown Reason = "DESCRIPTOR_SET_UNKNOWN"
	AnswerIncomplete     Reason = "ANSWER_INCOMPLETE"
	AnswerInvalid        Reason = "ANSWER_INVALID"
	DeadlinePassed       Reason = "DEADLINE_PASSED"
	DeadlineUnreachable  Reason = "DEADLINE_UNREACHABLE"
	NumericFailure       Reason = "NUMERIC_FAILURE"
	RequestQuarantined   Reason = "REQUEST_QUARANTINED"
	AbortedByAdmin       Reason = "ABORTED_BY_ADMIN"
	Cancelled            Reason = "CANCELLED"
	InternalFailure      Reason = "INTERNAL_FAILURE"
	// What came is no whole message of the type that was asked for.
	MessageMismatch Reason = "MESSAGE_MISMATCH"

	// The server cannot serve now.
	Unavailable      Reason = "UNAVAILABLE"
	ModelLoading     Reason = "MODEL_LOADING"
	Draining         Reason = "DRAINING"
	EngineRestarting Reason = "ENGINE_RESTARTING"
	EngineFailure    Reason = "ENGINE_FAILURE"
	// Others needed the place of an idle shared stream; Multiplex opens another.
	IdleStreamEvicted Reason = "IDLE_STREAM_EVICTED"
	// No server answered, or the connection was lost.
	Unreachable Reason = "UNREACHABLE"

	// The client was closed, before the call or during it.
	Closed Reason = "CLOSED"
)

// Each known reason, and what it is a member of.
var memberOf = map[Reason]Reason{
	RequestError:         "",
	Unavailable:          "",
	Closed:               "",
	InvalidRequest:       RequestError,
	MalformedMessage:     InvalidRequest,
	PromptTooLong:        InvalidRequest,
	InvalidConstraint:    InvalidRequest,
	InvalidTemplate:      InvalidRequest,
	ModelNotFound:        RequestError,
	FeatureNotSupported:  RequestError,
	DuplicateRequestId:   RequestError,
	NotAllowed:           RequestError,
	MissingCredentials:   NotAllowed,
	InvalidCredentials:   NotAllowed,
	ScopeRequired:        NotAllowed,
	Overloaded:           RequestError,
	QueueFull:            Overloaded,
	QueueTimeout:         Overloaded,
	QuotaExceeded:        Overloaded,
	KVCapacity:           RequestError,
	DescriptorSetUnknown: RequestError,
	AnswerIncomplete:     RequestError,
	AnswerInvalid:        RequestError,
	DeadlinePassed:       RequestError,
	DeadlineUnreachable:  DeadlinePassed,
	NumericFailure:       RequestError,
	RequestQuarantined:   RequestError,
	AbortedByAdmin:       RequestError,
	Cancelled:            RequestError,
	InternalFailure:      RequestError,
	MessageMismatch:      RequestError,
	ModelLoading:         Unavailable,
	Draining:             Unavailable,
	EngineRestarting:     Unavailable,
	EngineFailure:        Unavailable,
	IdleStreamEvicted:    Unavailable,
	Unreachable:          Unavailable,
}

// What a status without our details means: it came from gRPC itself, a proxy or another server.
var byCode = map[codes.Code]Reason{
	codes.InvalidArgument:   InvalidRequest,
	codes.NotFound:          ModelNotFound,
	codes.Unimplemented:     FeatureNotSupported,
	codes.AlreadyExists:     DuplicateRequestId,
	codes.Unauthenticated:   InvalidCredentials,
	codes.PermissionDenied:  ScopeRequired,
	codes.ResourceExhausted: Overloaded,
	codes.DeadlineExceeded:  DeadlinePassed,
	codes.Unavailable:       Unreachable,
	codes.Canceled:          Unreachable,
}

func (r Reason) Error() string { return string(r) }

// Proto is the reason's value in the API's enum, for a switch over them; ERROR_REASON_UNSPECIFIED where it has none: groups,
// failures of this side, and what a newer server says.
func (r Reason) Proto() pb.ErrorReason {
	return pb.ErrorReason(pb.ErrorReason_value["ERROR_REASON_"+string(r)])
}

// FieldViolation says what is wrong with one field of a request; Field is its path in the proto.
type FieldViolation struct {
	Field       string
	Description string
}

// Error is the failure of a call. errors.Is takes a Reason; context.Canceled is Cancelled, context.DeadlineExceeded is
// DeadlinePassed, and so DeadlineUnreachable. status.FromError takes the error as it is.
type Error struct {
	Code    codes.Code
	Reason  Reason
	Message string
	// Of InvalidRequest and its members; of others the field alone, where the server names one.
	Violations []FieldViolation
	// What was asked for and what is possible, in the unit that Message names; 0 where the failure has none, cut toward zero
	// where it is a fraction, as of a temperature.
	Needed, Limit int64
	// The same numbers with their fractions.
	NeededValue, LimitValue float64
	// When to come back: 0 where the server does not say, negative where asking again cannot succeed.
	RetryAfter time.Duration

	cause error
}

func (e *Error) Error() string { return fmt.Sprintf("photon: %s: %s", e.Reason, e.Message) }

// Unwrap gives what gRPC said, with all details; nil where the failure is this side's.
func (e *Error) Unwrap() error { return e.cause }

// GRPCStatus is what status.FromError and status.Code read.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// Is reports whether target is e's Reason, or one that e's is a member of.
func (e *Error) Is(target error) bool {
	switch target {
	case context.Canceled:
		target = Cancelled
	case context.DeadlineExceeded:
		target = DeadlinePassed
	}
	wanted, ok := target.(Reason)
	if !ok {
		return false
	}
	reason := e.Reason
	for reason != wanted && reason != "" {
		member, known := memberOf[reason]
		if !known {
			// A newer server's word; what its status means is known.
			member = e.meaning()
		}
		reason = member
	}
	return reason == wanted
}

func (e *Error) meaning() Reason {
	if reason, ok := byCode[e.Code]; ok {
		return reason
	}
	return InternalFailure
}

// toError makes the Error of a failed call; nil and errors that are one already pass.
func (c *Client) toError(ctx context.Context, err error, trailer metadata.MD) error {
	var made *Error
	if err == nil || errors.As(err, &made) {
		return err
	}
	if c.closed.Load() {
		return closedError()
	}
	told, _ := status.FromError(err)
	failure := fromStatus(told, c.target)
	if pushback := milliseconds(trailer.Get(pushbackKey)); failure.RetryAfter == 0 {
		failure.RetryAfter = pushback
	}
	failure.cause = err
	if ctx.Err() != nil && failure.Code == codes.Canceled {
		return contextError(ctx)
	}
	return failure
}

// contextError is the Error of a call that its context ended.
func contextError(ctx context.Context) *Error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return &Error{Code: codes.DeadlineExceeded, Reason: DeadlinePassed, Message: deadlineHasPassed}
	}
	return &Error{Code: codes.Canceled, Reason: Cancelled, Message: "cancelled by its caller"}
}

func closedError() *Error {
	return &Error{Code: codes.Canceled, Reason: Closed, Message: "the client was closed"}
}

func fromStatus(told *status.Status, target string) *Error {
	failure := &Error{Code: told.Code(), Message: told.Message()}
	field := ""
	for _, detail := range told.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == errorDomain {
				failure.Reason = Reason(detail.Reason)
				failure.Needed, failure.NeededValue = number(detail.Metadata["needed"])
				failure.Limit, failure.LimitValue = number(detail.Metadata["limit"])
				field = detail.Metadata["field"]
			}
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				failure.Violations = append(failure.Violations, FieldViolation{violation.Field, violation.Description})
			}
		case *errdetails.RetryInfo:
			failure.RetryAfter = detail.RetryDelay.AsDuration()
		}
	}
	if field != "" && len(failure.Violations) == 0 {
		failure.Violations = []FieldViolation{{Field: field}}
	}
	if failure.Reason == "" {
		failure.Reason = failure.meaning()
		switch failure.Reason {
		case DeadlinePassed:
			failure.Message = deadlineHasPassed
		case Unreachable:
			failure.Message = fmt.Sprintf("no answer from %s (%s)", target, told.Message())
		}
	}
	return failure
}

func invalid(field, format string, args ...any) *Error {
	message := fmt.Sprintf(format, args...)
	return &Error{
		Code:       codes.InvalidArgument,
		Reason:     InvalidRequest,
		Message:    message,
		Violations: []FieldViolation{{field, message}},
	}
}

func mismatch(format string, args ...any) *Error {
	return &Error{Code: codes.Internal, Reason: MessageMismatch, Message: fmt.Sprintf(format, args...)}
}

// number reads a number of ErrorInfo as a whole one, cut toward zero, and as it is; zeros where there is none.
func number(text string) (int64, float64) {
	if whole, err := strconv.ParseInt(text, 10, 64); err == nil {
		return whole, float64(whole)
	}
	value, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsInf(value, 0) || math.IsNaN(value) {
		return 0, 0
	}
	if math.Abs(value) >= 1<<63 {
		return 0, value
	}
	return int64(value), value
}

// milliseconds reads a pushback: what is no number means "do not ask again", as gRPC reads it.
func milliseconds(values []string) time.Duration {
	if len(values) == 0 {
		return 0
	}
	value, err := strconv.ParseInt(strings.TrimSpace(values[0]), 10, 32)
	if err != nil || value < 0 {
		return -1
	}
	return time.Duration(value) * time.Millisecond
}
