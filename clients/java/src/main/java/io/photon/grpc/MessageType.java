package io.photon.grpc;

import com.google.protobuf.DescriptorProtos.FileDescriptorSet;
import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Descriptors.FileDescriptor;
import com.google.protobuf.Internal;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import io.photon.grpc.v1.StructuredOutput;
import io.photon.grpc.v1.TypedMessage;
import java.util.LinkedHashMap;
import java.util.Map;

/** A generated class, described to the server, and its messages read back. */
record MessageType<T extends Message>(Class<T> type, T empty) {
  /** Files that the server has. */
  private static final String WELL_KNOWN = "google/protobuf/";

  private static final JsonFormat.Parser PARSER = JsonFormat.parser();

  /** Of a class: its file and all that it imports, large ones megabytes. */
  private static final ClassValue<StructuredOutput.Protobuf> DESCRIBED =
      new ClassValue<>() {
        @Override
        protected StructuredOutput.Protobuf computeValue(Class<?> type) {
          return described(Internal.getDefaultInstance(type.asSubclass(Message.class)).getDescriptorForType());
        }
      };

  static <T extends Message> MessageType<T> of(Class<T> type) {
    return new MessageType<>(type, Internal.getDefaultInstance(type));
  }

  StructuredOutput.Protobuf describe() {
    return DESCRIBED.get(type);
  }

  private static StructuredOutput.Protobuf described(Descriptor message) {
    var files = new LinkedHashMap<String, FileDescriptor>();
    gather(message.getFile(), files);
    var set = FileDescriptorSet.newBuilder();
    files.values().forEach(file -> set.addFile(file.toProto()));
    return StructuredOutput.Protobuf.newBuilder()
        .setFileDescriptorSet(set.build().toByteString())
        .setMessageType(message.getFullName())
        .build();
  }

  String name() {
    return empty.getDescriptorForType().getFullName();
  }

  /** Throw WrongMessageType for a message of another type, MessageMismatch for none or one that cannot be read. */
  @SuppressWarnings("unchecked")
  T unpack(TypedMessage message) {
    if (message == null) {
      throw new PhotonException.MessageMismatch("the output has no message; " + name() + " is wanted");
    }
    var url = message.getTypeUrl();
    var got = url.substring(url.lastIndexOf('/') + 1);
    if (!got.equals(name())) {
      throw new PhotonException.WrongMessageType(got, name());
    }
    try {
      return (T) empty.getParserForType().parseFrom(message.getValue());
    } catch (InvalidProtocolBufferException broken) {
      throw new PhotonException.MessageMismatch("the server's bytes are no " + name() + ": " + broken.getMessage());
    }
  }

  /** Throw MessageMismatch where the JSON is none of this type. */
  T parse(String json) {
    try {
      return read(json);
    } catch (InvalidProtocolBufferException problem) {
      throw new PhotonException.MessageMismatch("no " + name() + ": " + problem.getMessage());
    }
  }

  @SuppressWarnings("unchecked")
  T read(String json) throws InvalidProtocolBufferException {
    var builder = empty.newBuilderForType();
    PARSER.merge(json, builder);
    return (T) builder.build();
  }

  private static void gather(FileDescriptor file, Map<String, FileDescriptor> files) {
    if (files.putIfAbsent(file.getName(), file) == null) {
      file.getDependencies().stream()
          .filter(needed -> !needed.getName().startsWith(WELL_KNOWN))
          .forEach(needed -> gather(needed, files));
    }
  }
}
