package io.photon.grpc;

import com.google.protobuf.Message;
import io.photon.grpc.v1.TypedMessage;

/** Messages of a program's own types, out of what the server sends. */
public final class TypedMessages {
  /**
   * The message as one of {@code type}; throw WrongMessageType where it is of another type, MessageMismatch where it is
   * null or cannot be read.
   */
  public static <T extends Message> T unpack(TypedMessage message, Class<T> type) {
    return MessageType.of(type).unpack(message);
  }

  private TypedMessages() {}
}
