package io.photon.grpc;

import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Descriptors.FieldDescriptor;
import java.util.ArrayDeque;
import java.util.Deque;

/**
 * The beginning of a message's JSON, made whole: what is open is closed, and a value that is not complete is left out;
 * a string field alone grows as it is written. Reads each character once.
 */
final class PartialJson {
  /** An object or array that is open. {@code message} is null where its keys are no field names. */
  private static final class Level {
    final char close;
    final Descriptor message;
    /** What its values are; of a message, the field of the last key. */
    FieldDescriptor field;

    boolean isKeyDue;

    Level(char close, Descriptor message, FieldDescriptor field) {
      this.close = close;
      this.message = message;
      this.field = field;
      this.isKeyDue = close == '}';
    }
  }

  private final StringBuilder text = new StringBuilder();
  private final Deque<Level> open = new ArrayDeque<>();
  private final Descriptor root;
  /** Text before it is complete but for the closing of what is open. */
  private int end;

  private int stringStart = -1;
  /** Characters of an escape that are still to come. */
  private int escapeLeft;

  private boolean isKey;

  PartialJson(Descriptor root) {
    this.root = root;
  }

  void append(String more) {
    for (int i = 0; i < more.length(); i++) {
      text.append(more.charAt(i));
      read(more.charAt(i));
    }
  }

  /** Characters up to which every value is complete. */
  int end() {
    return end;
  }

  /** Valid JSON of what is known; empty before anything is. */
  String closed() {
    var whole = new StringBuilder();
    if (growsString()) {
      whole.append(text, 0, completeUpTo()).append('"');
    } else {
      whole.append(text, 0, end);
    }
    open.forEach(level -> whole.append(level.close));
    return whole.toString();
  }

  private void read(char character) {
    if (stringStart >= 0) {
      readInString(character);
      return;
    }
    switch (character) {
      case '"' -> {
        stringStart = text.length() - 1;
        isKey = !open.isEmpty() && open.peek().isKeyDue;
      }
      case '{', '[' -> open(character);
      case '}', ']' -> close();
      case ':' -> open.peek().isKeyDue = false;
      case ',' -> {
        end = text.length() - 1;
        open.peek().isKeyDue = open.peek().close == '}';
      }
      default -> {}
    }
  }

  private void readInString(char character) {
    if (escapeLeft > 0) {
      var isUnicode = character == 'u' && text.charAt(text.length() - 2) == '\\' && escapeLeft == 1;
      escapeLeft = isUnicode ? 4 : escapeLeft - 1;
    } else if (character == '\\') {
      escapeLeft = 1;
    } else if (character == '"') {
      endString();
    }
  }

  private void endString() {
    var content = text.substring(stringStart + 1, text.length() - 1);
    stringStart = -1;
    if (!isKey) {
      end = text.length();
    } else if (open.peek().message != null) {
      open.peek().field = fieldOf(open.peek().message, content);
    }
  }

  private void open(char character) {
    var of = open.isEmpty() ? null : open.peek().field;
    if (character == '[') {
      open.push(new Level(']', null, of));
    } else if (of != null && of.isMapField()) {
      open.push(new Level('}', null, of.getMessageType().findFieldByName("value")));
    } else {
      open.push(new Level('}', open.isEmpty() ? root : messageOf(of), null));
    }
    end = text.length();
  }

  private void close() {
    open.pop();
    end = text.length();
  }

  private boolean growsString() {
    if (stringStart < 0 || isKey || open.isEmpty()) {
      return false;
    }
    var field = open.peek().field;
    return field != null && field.getType() == FieldDescriptor.Type.STRING;
  }

  /** Up to an escape, or to half a surrogate pair, that is not complete. */
  private int completeUpTo() {
    var last = escapeLeft > 0 ? text.lastIndexOf("\\") : text.length();
    var high = highSurrogate(last);
    return high < 0 ? last : high;
  }

  /** Where an escaped high surrogate without its other half begins, right before {@code last}; else -1. */
  private int highSurrogate(int last) {
    var start = last - 6;
    if (start <= stringStart || text.charAt(start) != '\\' || text.charAt(start + 1) != 'u') {
      return -1;
    }
    return Character.isHighSurrogate((char) Integer.parseInt(text.substring(start + 2, last), 16)) ? start : -1;
  }

  private static FieldDescriptor fieldOf(Descriptor message, String name) {
    return message.getFields().stream()
        .filter(field -> field.getJsonName().equals(name) || field.getName().equals(name))
        .findFirst()
        .orElse(null);
  }

  private static Descriptor messageOf(FieldDescriptor field) {
    return field != null && field.getJavaType() == FieldDescriptor.JavaType.MESSAGE ? field.getMessageType() : null;
  }
}
