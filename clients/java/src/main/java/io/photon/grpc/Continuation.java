package io.photon.grpc;

/** Whether a stream that goes on elsewhere has the bits that its first server would have given. */
final class Continuation {
  private static final System.Logger LOG = System.getLogger("io.photon.grpc");

  /** Servers in this mode promise no bits, not even to themselves. */
  private static final String FAST = "fast-";

  /** Between the versions of the servers that gave one result which is not bit-exact; see {@link Gatherer}. */
  private static final String SEPARATOR = ",";

  private Continuation() {}

  /**
   * Compare the numerics versions of an interrupted stream and of its continuation; all clients have this rule. An older
   * server sends none, and promises nothing.
   */
  static boolean isBitExact(String before, String after) {
    return before.equals(after) && !after.isEmpty() && !after.startsWith(FAST);
  }

  static void tell(String requestId, String before, String after) {
    LOG.log(
        System.Logger.Level.WARNING,
        "request {0} was continued by a server with other numerics (\"{1}\", before \"{2}\"): its ids may differ from"
            + " those of one server",
        requestId,
        after,
        before);
  }

  static String join(String before, String after) {
    return before + SEPARATOR + after;
  }

  static boolean isJoined(String versions) {
    return versions.contains(SEPARATOR);
  }

  static String first(String versions) {
    return versions.split(SEPARATOR, 2)[0];
  }
}
