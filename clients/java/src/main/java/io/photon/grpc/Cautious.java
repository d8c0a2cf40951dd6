package io.photon.grpc;

import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import io.photon.grpc.v1.Annotations;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.TokenizeRequest;
import java.util.List;
import java.util.stream.Stream;

/** A field that must not be ignored (the option {@code needs_refusal}), or one that has such fields below. */
record Cautious(FieldDescriptor field, List<Cautious> below) {
  private static final List<Cautious> OF_GENERATE = of(GenerateRequest.getDescriptor());
  private static final List<Cautious> OF_TOKENIZE = of(TokenizeRequest.getDescriptor());

  /** The path of the first such field that a request sets; empty where it sets none. */
  static String first(GenerateRequest request) {
    return first(request, OF_GENERATE, "");
  }

  static String first(TokenizeRequest request) {
    return first(request, OF_TOKENIZE, "");
  }

  private static List<Cautious> of(Descriptor message) {
    return message.getFields().stream().flatMap(Cautious::of).toList();
  }

  private static Stream<Cautious> of(FieldDescriptor field) {
    if (field.getOptions().getExtension(Annotations.needsRefusal)) {
      return Stream.of(new Cautious(field, List.of()));
    }
    var isMessage = field.getJavaType() == FieldDescriptor.JavaType.MESSAGE && !field.isMapField();
    var below = isMessage ? of(field.getMessageType()) : List.<Cautious>of();
    return below.isEmpty() ? Stream.empty() : Stream.of(new Cautious(field, below));
  }

  private static String first(Message message, List<Cautious> fields, String prefix) {
    for (var each : fields) {
      var found = each.find(message, prefix + each.field.getName());
      if (!found.isEmpty()) {
        return found;
      }
    }
    return "";
  }

  private String find(Message message, String path) {
    if (below.isEmpty()) {
      var isSet = field.isRepeated() ? message.getRepeatedFieldCount(field) > 0 : message.hasField(field);
      return isSet ? path : "";
    }
    if (!field.isRepeated()) {
      return message.hasField(field) ? first((Message) message.getField(field), below, path + ".") : "";
    }
    for (int i = 0; i < message.getRepeatedFieldCount(field); i++) {
      var found = first((Message) message.getRepeatedField(field, i), below, path + "[" + i + "].");
      if (!found.isEmpty()) {
        return found;
      }
    }
    return "";
  }
}
