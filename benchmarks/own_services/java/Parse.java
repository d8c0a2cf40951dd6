import com.google.protobuf.DescriptorProtos.FileDescriptorProto;
import com.google.protobuf.DescriptorProtos.FileDescriptorSet;
import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Descriptors.EnumValueDescriptor;
import com.google.protobuf.Descriptors.FileDescriptor;
import com.google.protobuf.DynamicMessage;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * Parses recorded answers with Java's protobuf, strictly, and prints how many of them it accepts.
 *
 * <p>The arguments are a FileDescriptorSet and a file with a message type and a message in base64 on each line.
 */
public final class Parse {
  private final Map<String, FileDescriptorProto> protos = new HashMap<>();
  private final Map<String, FileDescriptor> files = new HashMap<>();
  private final Map<String, Descriptor> types = new HashMap<>();

  public static void main(String[] arguments) throws Exception {
    Parse parse = new Parse(FileDescriptorSet.parseFrom(Files.readAllBytes(Path.of(arguments[0]))));
    int count = 0;
    for (String line : Files.readAllLines(Path.of(arguments[1]))) {
      String[] parts = line.split(" ", 2);
      try {
        parse.parse(parts[0], Base64.getDecoder().decode(parts[1]));
      } catch (Exception error) {
        throw new IllegalArgumentException(line, error);
      }
      count++;
    }
    System.out.println(count);
  }

  private Parse(FileDescriptorSet set) throws Exception {
    // The files of protobuf, which a set may leave out.
    for (FileDescriptor known :
        List.of(
            com.google.protobuf.AnyProto.getDescriptor(),
            com.google.protobuf.DurationProto.getDescriptor(),
            com.google.protobuf.EmptyProto.getDescriptor(),
            com.google.protobuf.FieldMaskProto.getDescriptor(),
            com.google.protobuf.StructProto.getDescriptor(),
            com.google.protobuf.TimestampProto.getDescriptor(),
            com.google.protobuf.WrappersProto.getDescriptor(),
            com.google.protobuf.DescriptorProtos.getDescriptor())) {
      add(known);
    }
    for (FileDescriptorProto file : set.getFileList()) {
      protos.put(file.getName(), file);
    }
    for (FileDescriptorProto file : set.getFileList()) {
      file(file.getName());
    }
  }

  private void add(FileDescriptor file) {
    files.put(file.getName(), file);
    file.getMessageTypes().forEach(this::add);
  }

  private void add(Descriptor type) {
    types.put(type.getFullName(), type);
    type.getNestedTypes().forEach(this::add);
  }

  private FileDescriptor file(String name) throws Exception {
    if (!files.containsKey(name)) {
      FileDescriptorProto proto = protos.get(name);
      FileDescriptor[] imports = new FileDescriptor[proto.getDependencyCount()];
      for (int i = 0; i < imports.length; i++) {
        imports[i] = file(proto.getDependency(i));
      }
      add(FileDescriptor.buildFrom(proto, imports));
    }
    return files.get(name);
  }

  private void parse(String type, byte[] data) throws Exception {
    DynamicMessage message = DynamicMessage.parseFrom(types.get(type), data);
    check(message);
    // Its JSON has checks that the wire has not: times, durations, masks.
    JsonFormat.printer().print(message);
  }

  private static void check(Message message) {
    if (!message.getUnknownFields().asMap().isEmpty()) {
      throw new IllegalArgumentException("unknown fields of " + message.getDescriptorForType().getFullName());
    }
    message.getAllFields().values().forEach(Parse::checkValue);
  }

  private static void checkValue(Object value) {
    if (value instanceof List<?> values) {
      values.forEach(Parse::checkValue);
    } else if (value instanceof Message message) {
      check(message);
    } else if (value instanceof EnumValueDescriptor number && number.getIndex() < 0) {
      throw new IllegalArgumentException("no value of " + number.getType().getFullName());
    }
  }
}
