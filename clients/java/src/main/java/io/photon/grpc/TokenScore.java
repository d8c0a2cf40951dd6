package io.photon.grpc;

import com.google.protobuf.ByteString;
import java.util.List;

/**
 * How likely the model held one token. {@code logprob} is null for the first token of a prompt; {@code candidates} are
 * the N most likely, best first, then the ids that the caller gave.
 */
public record TokenScore(int tokenId, Float logprob, int rank, ByteString tokenBytes, List<Candidate> candidates) {
  static TokenScore of(io.photon.grpc.v1.TokenScore message) {
    return new TokenScore(
        message.getTokenId(),
        message.hasLogprob() ? message.getLogprob() : null,
        message.getRank(),
        message.getTokenBytes(),
        message.getCandidatesList().stream().map(Candidate::of).toList());
  }

  static List<TokenScore> of(List<io.photon.grpc.v1.TokenScore> messages) {
    return messages.isEmpty() ? List.of() : messages.stream().map(TokenScore::of).toList();
  }
}
