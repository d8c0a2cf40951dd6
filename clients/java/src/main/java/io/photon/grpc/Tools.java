package io.photon.grpc;

import com.google.gson.Gson;
import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Descriptors.EnumValueDescriptor;
import com.google.protobuf.Descriptors.FieldDescriptor;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;

/** The arguments of tools that take messages: JSON Schemas of their proto3 JSON. */
final class Tools {
  private static final String GOOGLE = "google.protobuf.";
  /** As proto3 JSON writes them. */
  private static final Map<String, Map<String, Object>> WELL_KNOWN =
      Map.of(
          GOOGLE + "Timestamp", Map.of("type", "string", "format", "date-time"),
          GOOGLE + "Duration", Map.of("type", "string"),
          GOOGLE + "FieldMask", Map.of("type", "string"),
          GOOGLE + "Struct", Map.of("type", "object"),
          GOOGLE + "ListValue", Map.of("type", "array"),
          GOOGLE + "Value", Map.of());

  /** The JSON Schema of a message's proto3 JSON. Throw InvalidRequest for a type that holds itself. */
  static String schema(Descriptor message) {
    return new Gson().toJson(object(message, Set.of()));
  }

  private static Map<String, Object> object(Descriptor message, Set<String> around) {
    var within = new TreeSet<>(around);
    if (!within.add(message.getFullName())) {
      throw new PhotonException.InvalidRequest("chat.tools", message.getFullName() + " holds itself");
    }
    var fields = new LinkedHashMap<String, Object>();
    message.getFields().forEach(field -> fields.put(field.getJsonName(), field(field, within)));
    return Map.of("type", "object", "properties", fields, "additionalProperties", false);
  }

  private static Map<String, Object> field(FieldDescriptor field, Set<String> around) {
    if (field.isMapField()) {
      var value = value(field.getMessageType().findFieldByName("value"), around);
      return Map.of("type", "object", "additionalProperties", value);
    }
    var one = value(field, around);
    return field.isRepeated() ? Map.of("type", "array", "items", one) : one;
  }

  private static Map<String, Object> value(FieldDescriptor field, Set<String> around) {
    return switch (field.getJavaType()) {
      case MESSAGE -> message(field.getMessageType(), around);
      case ENUM -> Map.of(
          "enum", field.getEnumType().getValues().stream().map(EnumValueDescriptor::getName).toList());
      case BOOLEAN -> Map.of("type", "boolean");
      case STRING, BYTE_STRING -> Map.of("type", "string");
      case FLOAT, DOUBLE -> Map.of("type", "number");
      case INT, LONG -> Map.of("type", "integer");
    };
  }

  private static Map<String, Object> message(Descriptor type, Set<String> around) {
    var known = WELL_KNOWN.get(type.getFullName());
    if (known != null) {
      return known;
    }
    var isWrapper = type.getFullName().startsWith(GOOGLE) && type.getName().endsWith("Value");
    return isWrapper ? value(type.findFieldByName("value"), around) : object(type, around);
  }

  private Tools() {}
}
