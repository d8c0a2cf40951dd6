package io.photon.grpc;

import java.time.Duration;

/** Where the time went, on the server's clock, from arrival. */
public record Timing(Duration queue, Duration firstToken, Duration total, int preemptionCount) {
  static Timing of(io.photon.grpc.v1.Timing message) {
    return new Timing(
        Durations.read(message.getQueueDuration()),
        Durations.read(message.getFirstTokenDuration()),
        Durations.read(message.getTotalDuration()),
        message.getPreemptionCount());
  }
}
