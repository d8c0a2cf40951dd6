package io.photon.grpc;

import com.google.protobuf.Internal;
import com.google.protobuf.Message;

/**
 * Something that a chat's model may ask its reader to call. {@code parametersJson} is a JSON Schema of its arguments;
 * "": it takes none. {@code strict}, with {@code toolChoice}: whether arguments must validate against the schema; null:
 * they must.
 */
public record Tool(String name, String description, String parametersJson, Boolean strict) {
  public Tool(String name, String description, String parametersJson) {
    this(name, description, parametersJson, null);
  }

  /** A tool whose arguments are a message, named like its type. Throw InvalidRequest for a type that holds itself. */
  public static Tool of(Class<? extends Message> arguments, String description) {
    var type = Internal.getDefaultInstance(arguments).getDescriptorForType();
    return new Tool(type.getName(), description, Tools.schema(type));
  }

  io.photon.grpc.v1.Tool toProto() {
    var proto = io.photon.grpc.v1.Tool.newBuilder().setName(name).setDescription(description);
    if (strict != null) {
      proto.setStrict(strict);
    }
    return proto.setParametersJson(parametersJson).build();
  }
}
