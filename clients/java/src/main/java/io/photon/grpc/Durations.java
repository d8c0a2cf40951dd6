package io.photon.grpc;

import java.time.Duration;

/** java.time's durations and protobuf's. */
final class Durations {
  static Duration read(com.google.protobuf.Duration message) {
    return Duration.ofSeconds(message.getSeconds(), message.getNanos());
  }

  static com.google.protobuf.Duration write(Duration duration) {
    return com.google.protobuf.Duration.newBuilder()
        .setSeconds(duration.getSeconds())
        .setNanos(duration.getNano())
        .build();
  }

  private Durations() {}
}
