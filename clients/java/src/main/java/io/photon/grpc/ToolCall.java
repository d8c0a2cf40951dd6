package io.photon.grpc;

import com.google.protobuf.Message;
import java.util.List;

/**
 * A call that an output asks its reader to make; {@code index} is 0, 1, ... in its output. {@code id} names the call for
 * the message that answers it; a resumed stream has the same.
 */
public record ToolCall(int index, String name, String argumentsJson, String id) {
  /** The arguments as a message; throw MessageMismatch where the model wrote what {@code type} does not have. */
  public <T extends Message> T arguments(Class<T> type) {
    return MessageType.of(type).parse(argumentsJson);
  }

  static List<ToolCall> of(List<io.photon.grpc.v1.ToolCall> messages) {
    return messages.isEmpty() ? List.of() : messages.stream().map(ToolCall::of).toList();
  }

  private static ToolCall of(io.photon.grpc.v1.ToolCall message) {
    return new ToolCall(message.getIndex(), message.getName(), message.getArgumentsJson(), message.getId());
  }

  io.photon.grpc.v1.ToolCall toProto() {
    return io.photon.grpc.v1.ToolCall.newBuilder()
        .setIndex(index)
        .setName(name)
        .setArgumentsJson(argumentsJson)
        .setId(id)
        .build();
  }
}
