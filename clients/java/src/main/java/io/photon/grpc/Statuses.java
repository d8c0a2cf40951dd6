package io.photon.grpc;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusException;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.photon.grpc.PhotonException.Violation;
import java.math.BigDecimal;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletionException;

/** A gRPC status and its details as a {@link PhotonException}. */
final class Statuses {
  private static final String DOMAIN = "photon-grpc";
  private static final Metadata.Key<String> PUSHBACK =
      Metadata.Key.of("grpc-retry-pushback-ms", Metadata.ASCII_STRING_MARSHALLER);

  /** The exception of a call that ended with {@code status}. */
  static PhotonException error(Status status, Metadata trailers) {
    var details = StatusProto.fromStatusAndTrailers(status, trailers).getDetailsList();
    if (status.getCode() == Status.Code.DEADLINE_EXCEEDED && ours(details).isEmpty()) {
      var passed = error(status.getCode(), PhotonException.DEADLINE_PASSED, details, trailers);
      passed.initCause(status.asRuntimeException(trailers));
      return passed;
    }
    var message = Optional.ofNullable(status.getDescription()).orElse(status.getCode().name());
    if (status.getCause() != null) {
      message += ": " + status.getCause().getMessage();
    }
    var error = error(status.getCode(), message, details, trailers);
    if (status.getCause() != null) {
      error.initCause(status.getCause());
    }
    return error;
  }

  /** The exception of a failed blocking call or future. */
  static PhotonException error(Throwable failure) {
    if (failure instanceof PhotonException known) {
      return known;
    }
    if (failure instanceof CompletionException wrapped && wrapped.getCause() != null) {
      return error(wrapped.getCause());
    }
    var trailers =
        failure instanceof StatusRuntimeException raised
            ? raised.getTrailers()
            : failure instanceof StatusException raised ? raised.getTrailers() : null;
    return error(Status.fromThrowable(failure), trailers == null ? new Metadata() : trailers);
  }

  /** The exception of a failed request of a multiplexed stream. */
  static PhotonException error(com.google.rpc.Status item) {
    var details = item.getDetailsList();
    var code = Status.fromCodeValue(item.getCode()).getCode();
    return error(code, item.getMessage(), details, new Metadata());
  }

  private static PhotonException error(
      Status.Code code, String message, List<Any> details, Metadata trailers) {
    var info = ours(details);
    var reason = info.map(ErrorInfo::getReason).orElse(PhotonException.reasonOf(code));
    var facts =
        new PhotonException.Facts(
            code,
            reason,
            violations(details, info),
            number(info, "needed"),
            number(info, "limit"),
            retryAfter(details, trailers),
            isFinal(trailers));
    return PhotonException.of(message, facts);
  }

  private static Optional<ErrorInfo> ours(List<Any> details) {
    return find(details, ErrorInfo.class).filter(found -> found.getDomain().equals(DOMAIN));
  }

  private static List<Violation> violations(List<Any> details, Optional<ErrorInfo> info) {
    var told =
        find(details, BadRequest.class).stream()
            .flatMap(request -> request.getFieldViolationsList().stream())
            .map(each -> new Violation(each.getField(), each.getDescription()))
            .toList();
    var field = info.map(found -> found.getMetadataOrDefault("field", "")).orElse("");
    return told.isEmpty() && !field.isEmpty() ? List.of(new Violation(field, "")) : told;
  }

  private static Duration retryAfter(List<Any> details, Metadata trailers) {
    var told = find(details, RetryInfo.class).map(RetryInfo::getRetryDelay);
    if (told.isPresent()) {
      return Durations.read(told.get());
    }
    var milliseconds = milliseconds(trailers);
    return milliseconds == null || milliseconds < 0 ? null : Duration.ofMillis(milliseconds);
  }

  /** Whether the server says that asking again cannot help: its pushback is negative or, as gRPC reads it, no number. */
  private static boolean isFinal(Metadata trailers) {
    var milliseconds = milliseconds(trailers);
    return trailers.containsKey(PUSHBACK) && (milliseconds == null || milliseconds < 0);
  }

  private static Long milliseconds(Metadata trailers) {
    try {
      return trailers.containsKey(PUSHBACK) ? Long.valueOf(trailers.get(PUSHBACK)) : null;
    } catch (NumberFormatException none) {
      return null;
    }
  }

  private static <T extends Message> Optional<T> find(List<Any> details, Class<T> type) {
    for (var detail : details) {
      if (detail.is(type)) {
        try {
          return Optional.of(detail.unpack(type));
        } catch (InvalidProtocolBufferException broken) {
          return Optional.empty();
        }
      }
    }
    return Optional.empty();
  }

  private static BigDecimal number(Optional<ErrorInfo> info, String key) {
    try {
      return info.map(found -> new BigDecimal(found.getMetadataOrDefault(key, ""))).orElse(null);
    } catch (NumberFormatException none) {
      return null;
    }
  }

  private Statuses() {}
}
