package io.photon.grpc;

import io.photon.grpc.v1.Feature;
import io.photon.grpc.v1.Limits;
import io.photon.grpc.v1.ModelState;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;

/**
 * A served model. {@code state} and {@code features} are names of the proto's enums without their prefix: "READY",
 * "CHAT", ..., or numbers that this client has no name for; {@code limits} says by the limit's name what one request may ask for.
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
    String quantization,
    String numericsVersion) {
  private static final String STATE_PREFIX = "MODEL_STATE_";
  private static final String FEATURE_PREFIX = "FEATURE_";

  static Model of(io.photon.grpc.v1.Model message) {
    return new Model(
        message.getName(),
        List.copyOf(message.getAliasesList()),
        name(ModelState.forNumber(message.getStateValue()), message.getStateValue(), STATE_PREFIX),
        message.getMaxContextTokens(),
        message.getVocabSize(),
        List.copyOf(message.getEosTokenIdsList()),
        message.getFeaturesValueList().stream().map(each -> name(Feature.forNumber(each), each, FEATURE_PREFIX)).toList(),
        limits(message.getLimits()),
        message.getRevision(),
        message.getDtype(),
        message.getQuantization(),
        message.getNumericsVersion());
  }

  /** A newer server's has no name here yet: its number stands for it. */
  private static String name(Enum<?> known, int number, String prefix) {
    return known == null ? String.valueOf(number) : known.name().substring(prefix.length());
  }

  private static Map<String, Integer> limits(Limits message) {
    return Limits.getDescriptor().getFields().stream()
        .collect(Collectors.toUnmodifiableMap(each -> each.getName(), each -> (Integer) message.getField(each)));
  }
}
