package io.photon.grpc;

import com.google.protobuf.Timestamp;
import java.time.Duration;
import java.time.Instant;

/** java.time's durations and times, and protobuf's. */
final class Durations {
  static Duration read(com.google.protobuf.Duration message) {
    return Duration.ofSeconds(message.getSeconds(), message.getNanos());
  }

  static Instant read(Timestamp message) {
    return Instant.ofEpochSecond(message.getSeconds(), message.getNanos());
  }

  static com.google.protobuf.Duration write(Duration duration) {
    return com.google.protobuf.Duration.newBuilder()
        .setSeconds(duration.getSeconds())
        .setNanos(duration.getNano())
        .build();
  }

  private Durations() {}
}
