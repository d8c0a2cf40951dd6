package io.photon.grpc;

/** The two servers that the tests share, started together when the first test asks; the program's end ends them. */
final class Replicas {
  static final Replica ONE = Replica.start("--drain-timeout", "1");
  static final Replica OTHER = Replica.start("--drain-timeout", "1");

  static {
    ONE.awaitReady();
    OTHER.awaitReady();
  }

  /** Both under one name. */
  static String targets() {
    return "ipv4:" + ONE.target + "," + OTHER.target;
  }

  private Replicas() {}
}
