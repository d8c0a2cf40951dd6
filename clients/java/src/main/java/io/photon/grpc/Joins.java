package io.photon.grpc;

import com.google.protobuf.Descriptors.FieldDescriptor;
import io.photon.grpc.v1.Annotations;
import io.photon.grpc.v1.Delta;
import io.photon.grpc.v1.Output;
import io.photon.grpc.v1.StreamGenerateResponse;
import java.util.List;

/** How the parts of an output join: by the option {@code delta} of each of its fields, read once. */
final class Joins {
  private static final List<FieldDescriptor> APPENDED = fields(Delta.DELTA_APPEND);
  private static final List<FieldDescriptor> SET = fields(Delta.DELTA_ONCE);
  private static final List<FieldDescriptor> KEYS = fields(Delta.DELTA_KEY);

  /** Add a part of an output to what came of it before. Fields of a newer server are kept as they came. */
  static void join(Output.Builder whole, Output part) {
    for (var field : APPENDED) {
      append(whole, field, part);
    }
    for (var field : SET) {
      if (part.hasField(field)) {
        whole.setField(field, part.getField(field));
      }
    }
    for (var field : KEYS) {
      whole.setField(field, part.getField(field));
    }
    whole.mergeUnknownFields(part.getUnknownFields());
  }

  /** Whether a message has only a sequence, or only what this client does not know. */
  static boolean isHeartbeat(StreamGenerateResponse message) {
    return !message.hasStart() && message.getDeltasCount() == 0 && !message.hasUsage() && !message.hasTiming();
  }

  private static void append(Output.Builder whole, FieldDescriptor field, Output part) {
    if (!field.isRepeated()) {
      whole.setField(field, whole.getField(field) + (String) part.getField(field));
      return;
    }
    for (int i = 0; i < part.getRepeatedFieldCount(field); i++) {
      whole.addRepeatedField(field, part.getRepeatedField(field, i));
    }
  }

  private static List<FieldDescriptor> fields(Delta join) {
    return Output.getDescriptor().getFields().stream()
        .filter(field -> field.getOptions().getExtension(Annotations.delta) == join)
        .toList();
  }

  private Joins() {}
}
