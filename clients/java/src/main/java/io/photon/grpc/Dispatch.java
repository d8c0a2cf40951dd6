package io.photon.grpc;

import com.google.protobuf.ByteString;
import io.grpc.Deadline;
import io.photon.grpc.v1.GenerateRequest;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.concurrent.CompletableFuture;

/**
 * A request in the form in which it is sent: with its descriptor set, or the set's digest. One with a field that a
 * server must not ignore is sent only where it is not.
 */
final class Dispatch {
  /** A descriptor set of more bytes is sent once, then by its digest. */
  static final int MAX_SET_BYTES = 4 << 10;

  private static final String SET_FIELD = "structured_output.protobuf.file_descriptor_set";

  private final Servers servers;
  private final GenerateRequest whole;
  /** Of a large descriptor set; null where there is none. */
  private final ByteString digest;

  private GenerateRequest message;
  private String field;

  Dispatch(Servers servers, GenerateRequest request) {
    this.servers = servers;
    whole = request;
    digest = digest(request);
    use(digest != null && servers.sets.has(digest) ? withDigest(request, digest) : request);
  }

  /** The request, where it may go to any server; null where {@link #admitted} must be asked. */
  GenerateRequest message() {
    return field.isEmpty() ? message : null;
  }

  /** The request in a form that is not ignored. Fails with FeatureNotSupported. */
  CompletableFuture<GenerateRequest> admitted(Deadline deadline) {
    return servers.refuseUnknownFields(deadline).handle(this::admitted);
  }

  /**
   * Whether to send a request that failed before its answer once more, now with its set: a replica that is older than
   * digests, among others that are not, misses a set.
   */
  boolean again(PhotonException error) {
    if (!isShort() || !isOfDigest(error)) {
      return false;
    }
    servers.sets.owe(digest);
    use(whole);
    return true;
  }

  /**
   * An answer came, from a server of this release. Throw FeatureNotSupported where it does not say one: replicas take
   * turns, and this one is older than a field that it has ignored.
   */
  void arrived(String release) {
    if (!field.isEmpty() && release.isEmpty()) {
      servers.forget();
      throw PhotonException.ignored(field);
    }
    if (digest != null && !isShort()) {
      servers.sets.add(digest);
    }
  }

  private GenerateRequest admitted(Boolean refuse, Throwable failure) {
    if (failure == null && refuse) {
      return message;
    }
    var why = failure == null ? null : Statuses.error(failure);
    if (isShort()) {
      if (why instanceof PhotonException.NotAllowed) {
        servers.sets.turnOff();
      }
      // Servers of any release understand it.
      use(whole);
      if (field.isEmpty()) {
        return message;
      }
    }
    throw why == null ? PhotonException.ignored(field) : why;
  }

  /** Servers that ignore digests report that the set is missing. */
  private static boolean isOfDigest(PhotonException error) {
    var isMissing = error.getClass() == PhotonException.InvalidRequest.class && error.field().equals(SET_FIELD);
    return isMissing
        || error instanceof PhotonException.DescriptorSetUnknown
        || error instanceof PhotonException.FeatureNotSupported;
  }

  private boolean isShort() {
    return message != whole;
  }

  private void use(GenerateRequest form) {
    message = form;
    field = Cautious.first(form);
  }

  private static ByteString digest(GenerateRequest request) {
    var typed = request.getStructuredOutput().getProtobuf();
    var set = typed.getFileDescriptorSet();
    if (set.size() <= MAX_SET_BYTES || !typed.getFileDescriptorSetSha256().isEmpty()) {
      return null;
    }
    try {
      var sha256 = MessageDigest.getInstance("SHA-256");
      set.asReadOnlyByteBufferList().forEach(sha256::update);
      return ByteString.copyFrom(sha256.digest());
    } catch (NoSuchAlgorithmException missing) {
      throw new IllegalStateException(missing); // Every Java has it.
    }
  }

  private static GenerateRequest withDigest(GenerateRequest request, ByteString digest) {
    var shorter = request.toBuilder();
    var type = shorter.getStructuredOutputBuilder().getProtobufBuilder();
    type.clearFileDescriptorSet().setFileDescriptorSetSha256(digest);
    return shorter.build();
  }
}
