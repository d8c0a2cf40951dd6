package io.photon.grpc;

import io.grpc.Status;
import io.photon.grpc.v1.ErrorReason;
import java.io.Serializable;
import java.math.BigDecimal;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.function.BiFunction;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/**
 * A failed call. The classes are named as in the other languages, and a test holds them to the same tree; catch one of
 * them, or a class above it, or look at {@link #reason}.
 */
public class PhotonException extends RuntimeException {
  /** A refused field, as the path of the proto, and why. */
  public record Violation(String field, String description) implements Serializable {}

  /**
   * Facts beside the message: {@code needed} and {@code limit} in the unit that the message names, and {@code
   * retryAfter}, are null where the server told none.
   */
  record Facts(
      Status.Code code,
      String reason,
      List<Violation> violations,
      BigDecimal needed,
      BigDecimal limit,
      Duration retryAfter,
      boolean isFinal)
      implements Serializable {
    static Facts of(Status.Code code, String reason, Violation... violations) {
      return new Facts(code, reason, List.of(violations), null, null, null, false);
    }
  }

  static final String DEADLINE_PASSED = "the deadline has passed";

  private static final BigDecimal PAST_LONG = new BigDecimal("9223372036854775808");

  private final Facts facts;

  PhotonException(String message, Facts facts) {
    super(message);
    this.facts = facts;
  }

  /** The status that the call ended with. */
  public Status.Code code() {
    return facts.code();
  }

  /** The word of the server's ErrorInfo, for example "QUEUE_FULL"; kept as it is where this client does not know it. */
  public String reason() {
    return facts.reason();
  }

  /**
   * The reason in the API's enum, for a switch over its values; UNSPECIFIED where it has none: groups, failures of this
   * side, and what a newer server says.
   */
  public ErrorReason errorReason() {
    return API_REASONS.getOrDefault(reason(), ErrorReason.ERROR_REASON_UNSPECIFIED);
  }

  /** The path of the first refused field, for example "sampling.top_p"; empty where no field is to blame. */
  public String field() {
    return violations().isEmpty() ? "" : violations().get(0).field();
  }

  public List<Violation> violations() {
    return facts.violations();
  }

  /**
   * What the request asks for, in the unit that the message names; null where there is no such number, cut toward zero
   * where it is a fraction, as of a temperature.
   */
  public Long needed() {
    return whole(facts.needed());
  }

  /** What is possible, in the same unit and form. */
  public Long limit() {
    return whole(facts.limit());
  }

  /** {@link #needed} with its fraction. */
  public Double neededValue() {
    return facts.needed() == null ? null : facts.needed().doubleValue();
  }

  /** {@link #limit} with its fraction. */
  public Double limitValue() {
    return facts.limit() == null ? null : facts.limit().doubleValue();
  }

  private static Long whole(BigDecimal value) {
    return value == null || value.abs().compareTo(PAST_LONG) >= 0 ? null : Long.valueOf(value.longValue());
  }

  /** When to come back; null where the server does not say, or asking again cannot help. */
  public Duration retryAfter() {
    return facts.retryAfter();
  }

  /** Whether the server says that the same call cannot succeed. */
  boolean isFinal() {
    return facts.isFinal();
  }

  /** The exception of a reason; one that this client does not know is told by its code. */
  static PhotonException of(String message, Facts facts) {
    var known = BY_REASON.get(facts.reason());
    return (known != null ? known : BY_REASON.get(reasonOf(facts.code()))).apply(message, facts);
  }

  /** What a status without our details means: it came from gRPC itself, a proxy or another server. */
  static String reasonOf(Status.Code code) {
    return REASONS.getOrDefault(code, "INTERNAL_FAILURE");
  }

  static PhotonException notReady(String target, Duration timeout) {
    var message = target + " was not ready within " + timeout.toSeconds() + " s";
    return new ModelLoading(message, Facts.of(Status.Code.UNAVAILABLE, "MODEL_LOADING"));
  }

  static PhotonException deadlinePassed() {
    return new DeadlinePassed(DEADLINE_PASSED, Facts.of(Status.Code.DEADLINE_EXCEEDED, "DEADLINE_PASSED"));
  }

  static PhotonException ignored(String field) {
    var problem =
        "the server is older than the field "
            + field
            + " and would ignore it (it lacks FEATURE_UNKNOWN_FIELDS_REFUSED); upgrade the server, or leave the field"
            + " unset";
    var facts = Facts.of(Status.Code.UNIMPLEMENTED, "FEATURE_NOT_SUPPORTED", new Violation(field, problem));
    return new FeatureNotSupported(problem, facts);
  }

  static PhotonException cut(String type, Finish finish) {
    return new MessageMismatch("the output ended by " + finish.reason() + " before its " + type + " was whole");
  }

  /** The same failure with more to say. */
  PhotonException saying(String more) {
    var said = of(getMessage() + more, facts);
    said.initCause(this);
    return said;
  }

  /** One request is refused or fails; the server goes on. */
  public static class RequestError extends PhotonException {
    RequestError(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** A field is wrong; {@link #field} names it. */
  public static class InvalidRequest extends RequestError {
    InvalidRequest(String message, Facts facts) {
      super(message, facts);
    }

    /** A mistake found before anything is sent. */
    InvalidRequest(String field, String problem) {
      this(
          field + ": " + problem,
          Facts.of(Status.Code.INVALID_ARGUMENT, "INVALID_REQUEST", new Violation(field, problem)));
    }
  }

  /** Bytes that are no message. */
  public static class MalformedMessage extends InvalidRequest {
    MalformedMessage(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The prompt, or prompt and max_tokens, exceed the context: {@link #needed} and {@link #limit} in tokens. */
  public static class PromptTooLong extends InvalidRequest {
    PromptTooLong(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** Structured output that cannot be compiled or met. */
  public static class InvalidConstraint extends InvalidRequest {
    InvalidConstraint(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The chat template refused. */
  public static class InvalidTemplate extends InvalidRequest {
    InvalidTemplate(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** No model or adapter of that name is served. */
  public static class ModelNotFound extends RequestError {
    ModelNotFound(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** Not supported by this model or build. */
  public static class FeatureNotSupported extends RequestError {
    FeatureNotSupported(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The id is in flight already. */
  public static class DuplicateRequestId extends RequestError {
    DuplicateRequestId(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The caller may not do this. */
  public static class NotAllowed extends RequestError {
    NotAllowed(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** No credentials. */
  public static class MissingCredentials extends NotAllowed {
    MissingCredentials(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** Wrong credentials. */
  public static class InvalidCredentials extends NotAllowed {
    InvalidCredentials(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The key lacks a scope. */
  public static class ScopeRequired extends NotAllowed {
    ScopeRequired(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** There is no room now; come back after {@link #retryAfter}. */
  public static class Overloaded extends RequestError {
    Overloaded(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The queue is full. */
  public static class QueueFull extends Overloaded {
    QueueFull(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** Waited longer than max_queue_duration. */
  public static class QueueTimeout extends Overloaded {
    QueueTimeout(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** Over the key's quota. */
  public static class QuotaExceeded extends Overloaded {
    QuotaExceeded(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** Can never fit the KV cache: {@link #needed} and {@link #limit} in blocks. */
  public static class KVCapacity extends RequestError {
    KVCapacity(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The replica has no descriptor set with a digest; the client then sends the set itself where it has it. */
  public static class DescriptorSetUnknown extends RequestError {
    DescriptorSetUnknown(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The answer to a method of a caller's own service was cut before its message was complete. */
  public static class AnswerIncomplete extends RequestError {
    AnswerIncomplete(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The answer to a method of a caller's own service breaks a rule of its message. */
  public static class AnswerInvalid extends RequestError {
    AnswerInvalid(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The deadline has passed. */
  public static class DeadlinePassed extends RequestError {
    DeadlinePassed(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The deadline cannot be met: the server says so before it passes. */
  public static class DeadlineUnreachable extends DeadlinePassed {
    DeadlineUnreachable(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The model gave NaN for this request. */
  public static class NumericFailure extends RequestError {
    NumericFailure(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** This request crashes the engine. */
  public static class RequestQuarantined extends RequestError {
    RequestQuarantined(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** Ended by an operator before any output. */
  public static class AbortedByAdmin extends RequestError {
    AbortedByAdmin(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** Ended by its caller. */
  public static class Cancelled extends RequestError {
    Cancelled(String message, Facts facts) {
      super(message, facts);
    }

    Cancelled(String message) {
      this(message, Facts.of(Status.Code.CANCELLED, "CANCELLED"));
    }
  }

  /** What came is no whole message of the type that was asked for. */
  public static class MessageMismatch extends RequestError {
    MessageMismatch(String message) {
      this(message, "MESSAGE_MISMATCH");
    }

    MessageMismatch(String message, String reason) {
      super(message, Facts.of(Status.Code.UNKNOWN, reason));
    }
  }

  /** The message is of another type; {@link #got} and {@link #want} are full names. */
  public static class WrongMessageType extends MessageMismatch {
    private final String got;
    private final String want;

    WrongMessageType(String got, String want) {
      super("the message is a " + got + "; " + want + " is wanted", "WRONG_MESSAGE_TYPE");
      this.got = got;
      this.want = want;
    }

    public String got() {
      return got;
    }

    public String want() {
      return want;
    }
  }

  /** A defect of the server, told without its insides. */
  public static class InternalFailure extends RequestError {
    InternalFailure(String message, Facts facts) {
      super(message, facts);
    }

    InternalFailure(String message) {
      this(message, Facts.of(Status.Code.INTERNAL, "INTERNAL_FAILURE"));
    }
  }

  /** The client, or the multiplex, was closed before the call or during it. */
  public static class Closed extends PhotonException {
    Closed(String message, Facts facts) {
      super(message, facts);
    }

    Closed(String message) {
      this(message, Facts.of(Status.Code.CANCELLED, "CLOSED"));
    }
  }

  /** The server cannot serve now; come back after {@link #retryAfter}. */
  public static class Unavailable extends PhotonException {
    Unavailable(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The model is being loaded. */
  public static class ModelLoading extends Unavailable {
    ModelLoading(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** The server is about to stop. */
  public static class Draining extends Unavailable {
    Draining(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** Nothing was sent yet: ask again. */
  public static class EngineRestarting extends Unavailable {
    EngineRestarting(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** Output had begun: continue from it. */
  public static class EngineFailure extends Unavailable {
    EngineFailure(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** Others needed the place of an idle stream; a {@link Multiplex} opens another. */
  public static class IdleStreamEvicted extends Unavailable {
    IdleStreamEvicted(String message, Facts facts) {
      super(message, facts);
    }
  }

  /** No server answered at the target, or the connection was lost. */
  public static class Unreachable extends Unavailable {
    Unreachable(String message, Facts facts) {
      super(message, facts);
    }

    Unreachable(String message) {
      this(message, Facts.of(Status.Code.UNAVAILABLE, "UNREACHABLE"));
    }
  }

  private static final Map<String, BiFunction<String, Facts, PhotonException>> BY_REASON =
      Map.ofEntries(
          Map.entry("REQUEST_ERROR", RequestError::new),
          Map.entry("INVALID_REQUEST", InvalidRequest::new),
          Map.entry("MALFORMED_MESSAGE", MalformedMessage::new),
          Map.entry("PROMPT_TOO_LONG", PromptTooLong::new),
          Map.entry("INVALID_CONSTRAINT", InvalidConstraint::new),
          Map.entry("INVALID_TEMPLATE", InvalidTemplate::new),
          Map.entry("MODEL_NOT_FOUND", ModelNotFound::new),
          Map.entry("FEATURE_NOT_SUPPORTED", FeatureNotSupported::new),
          Map.entry("DUPLICATE_REQUEST_ID", DuplicateRequestId::new),
          Map.entry("NOT_ALLOWED", NotAllowed::new),
          Map.entry("MISSING_CREDENTIALS", MissingCredentials::new),
          Map.entry("INVALID_CREDENTIALS", InvalidCredentials::new),
          Map.entry("SCOPE_REQUIRED", ScopeRequired::new),
          Map.entry("OVERLOADED", Overloaded::new),
          Map.entry("QUEUE_FULL", QueueFull::new),
          Map.entry("QUEUE_TIMEOUT", QueueTimeout::new),
          Map.entry("QUOTA_EXCEEDED", QuotaExceeded::new),
          Map.entry("KV_CAPACITY", KVCapacity::new),
          Map.entry("DESCRIPTOR_SET_UNKNOWN", DescriptorSetUnknown::new),
          Map.entry("ANSWER_INCOMPLETE", AnswerIncomplete::new),
          Map.entry("ANSWER_INVALID", AnswerInvalid::new),
          Map.entry("DEADLINE_UNREACHABLE", DeadlineUnreachable::new),
          Map.entry("DEADLINE_PASSED", DeadlinePassed::new),
          Map.entry("NUMERIC_FAILURE", NumericFailure::new),
          Map.entry("REQUEST_QUARANTINED", RequestQuarantined::new),
          Map.entry("ABORTED_BY_ADMIN", AbortedByAdmin::new),
          Map.entry("CANCELLED", Cancelled::new),
          Map.entry("CLOSED", Closed::new),
          Map.entry("INTERNAL_FAILURE", InternalFailure::new),
          Map.entry("UNAVAILABLE", Unavailable::new),
          Map.entry("MODEL_LOADING", ModelLoading::new),
          Map.entry("DRAINING", Draining::new),
          Map.entry("ENGINE_RESTARTING", EngineRestarting::new),
          Map.entry("ENGINE_FAILURE", EngineFailure::new),
          Map.entry("IDLE_STREAM_EVICTED", IdleStreamEvicted::new),
          Map.entry("UNREACHABLE", Unreachable::new));

  private static final String API_PREFIX = "ERROR_REASON_";

  private static final Map<String, ErrorReason> API_REASONS =
      Stream.of(ErrorReason.values())
          .filter(each -> each != ErrorReason.UNRECOGNIZED)
          .collect(Collectors.toUnmodifiableMap(each -> each.name().substring(API_PREFIX.length()), each -> each));

  private static final Map<Status.Code, String> REASONS =
      Map.of(
          Status.Code.INVALID_ARGUMENT, "INVALID_REQUEST",
          Status.Code.NOT_FOUND, "MODEL_NOT_FOUND",
          Status.Code.UNIMPLEMENTED, "FEATURE_NOT_SUPPORTED",
          Status.Code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID",
          Status.Code.UNAUTHENTICATED, "INVALID_CREDENTIALS",
          Status.Code.PERMISSION_DENIED, "SCOPE_REQUIRED",
          Status.Code.RESOURCE_EXHAUSTED, "OVERLOADED",
          Status.Code.DEADLINE_EXCEEDED, "DEADLINE_PASSED",
          Status.Code.UNAVAILABLE, "UNREACHABLE",
          Status.Code.CANCELLED, "UNREACHABLE");
}
