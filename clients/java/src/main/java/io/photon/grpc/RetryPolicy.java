package io.photon.grpc;

import io.grpc.Status;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ThreadLocalRandom;
import java.util.stream.Collectors;

/** The policy of the service config, which gRPC obeys for calls; here for what gRPC does not try again. */
record RetryPolicy(Duration first, Duration longest, double multiplier, Set<Status.Code> codes) {
  private static final RetryPolicy OURS = of(Channels.retryPolicy());

  static RetryPolicy ours() {
    return OURS;
  }

  /** How long to wait before the next attempt after so many: longer each time, with gRPC's own jitter. */
  Duration pause(int attempts) {
    var nanos = Math.min(first.toNanos() * Math.pow(multiplier, attempts - 1.0), longest.toNanos());
    return Duration.ofNanos((long) (nanos * ThreadLocalRandom.current().nextDouble(0.8, 1.2)));
  }

  private static RetryPolicy of(Map<String, Object> policy) {
    var codes = (List<?>) policy.get("retryableStatusCodes");
    return new RetryPolicy(
        duration(policy.get("initialBackoff")),
        duration(policy.get("maxBackoff")),
        (Double) policy.get("backoffMultiplier"),
        codes.stream().map(code -> Status.Code.valueOf((String) code)).collect(Collectors.toUnmodifiableSet()));
  }

  /** Of "0.1s". */
  private static Duration duration(Object text) {
    return Duration.parse("PT" + text);
  }
}
