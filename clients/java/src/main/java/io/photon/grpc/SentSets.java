package io.photon.grpc;

import com.google.protobuf.ByteString;
import java.util.LinkedHashMap;
import java.util.Map;

/** The descriptor sets, by their digests, that servers of a channel took. One that has lost a set says so. */
final class SentSets {
  private static final int MAX_DIGESTS = 1024;
  /**
   * Calls with the set itself after one whose digest was not known: replicas take turns, and each of as many gets it.
   * With one such call, the set could go to the same replica every time.
   */
  private static final int REPEATS = 16;

  /** For each, how many calls must have the set itself before its digest is enough. */
  private final Map<ByteString, Integer> owed =
      new LinkedHashMap<>() {
        @Override
        protected boolean removeEldestEntry(Map.Entry<ByteString, Integer> eldest) {
          return size() > MAX_DIGESTS;
        }
      };

  private boolean isOff;

  /** Whether the next call may have the digest in place of the set. */
  synchronized boolean has(ByteString digest) {
    var left = owed.get(digest);
    if (left != null && left > 0) {
      owed.put(digest, left - 1);
    }
    return left != null && left == 0 && !isOff;
  }

  synchronized void add(ByteString digest) {
    owed.putIfAbsent(digest, 0);
  }

  synchronized void owe(ByteString digest) {
    owed.put(digest, REPEATS);
  }

  /** Servers cannot be asked whether they know digests. */
  synchronized void turnOff() {
    isOff = true;
  }
}
