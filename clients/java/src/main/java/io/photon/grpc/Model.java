package io.photon.grpc;

import io.photon.grpc.v1.Feature;
import io.photon.grpc.v1.Limits;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;

/**
 * A served model. {@code state} and {@code features} are names of the proto's enums without their prefix: "READY",
 * "CHAT", ...; {@code limits} says by the limit's name what one request may ask for.
 */
public record Model(
    String name,
    List<String> aliases,
    String state,
    int maxContextTokens,
    int vocabSize,
    List<Integer> eosTokenIds,
    List<String> features,
    Map<String, Integer> limits,
    String revision,
    String dtype,
    String quantization) {
  private static final String STATE_PREFIX = "MODEL_STATE_";
  private static final String FEATURE_PREFIX = "FEATURE_";

  static Model of(io.photon.grpc.v1.Model message) {
    return new Model(
        message.getName(),
        List.copyOf(message.getAliasesList()),
        message.getState().name().substring(STATE_PREFIX.length()),
        message.getMaxContextTokens(),
        message.getVocabSize(),
        List.copyOf(message.getEosTokenIdsList()),
        message.getFeaturesValueList().stream().map(Model::feature).toList(),
        limits(message.getLimits()),
        message.getRevision(),
        message.getDtype(),
        message.getQuantization());
  }

  /** A newer server may list one that has no name here yet. */
  private static String feature(int number) {
    var known = Feature.forNumber(number);
    return known == null ? String.valueOf(number) : known.name().substring(FEATURE_PREFIX.length());
  }

  private static Map<String, Integer> limits(Limits message) {
    return Limits.getDescriptor().getFields().stream()
        .collect(Collectors.toUnmodifiableMap(each -> each.getName(), each -> (Integer) message.getField(each)));
  }
}
