package io.photon.grpc;

import com.google.protobuf.Any;
import com.google.protobuf.DescriptorProtos.FileDescriptorSet;
import com.google.protobuf.Descriptors.FileDescriptor;
import com.google.protobuf.Internal;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import io.photon.grpc.v1.StructuredOutput;
import java.util.LinkedHashMap;
import java.util.Map;

/** A generated class, described to the server, and its messages read back. */
record MessageType<T extends Message>(Class<T> type, T empty) {
  /** Files that the server has. */
  private static final String WELL_KNOWN = "google/protobuf/";

  private static final JsonFormat.Parser PARSER = JsonFormat.parser();

  static <T extends Message> MessageType<T> of(Class<T> type) {
    return new MessageType<>(type, Internal.getDefaultInstance(type));
  }

  /** The class's file and all that it imports. */
  StructuredOutput.Protobuf describe() {
    var files = new LinkedHashMap<String, FileDescriptor>();
    gather(empty.getDescriptorForType().getFile(), files);
    var set = FileDescriptorSet.newBuilder();
    files.values().forEach(file -> set.addFile(file.toProto()));
    return StructuredOutput.Protobuf.newBuilder()
        .setFileDescriptorSet(set.build().toByteString())
        .setMessageType(name())
        .build();
  }

  String name() {
    return empty.getDescriptorForType().getFullName();
  }

  /** Throw MessageMismatch where the server's message is of another type. */
  T unpack(Any message) {
    try {
      return message.unpack(type);
    } catch (InvalidProtocolBufferException other) {
      throw new PhotonException.MessageMismatch("the server's message is no " + name());
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
