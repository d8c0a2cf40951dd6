package io.photon.grpc;

import io.photon.grpc.v1.ChatInput;
import io.photon.grpc.v1.ChatMessage;
import java.util.ArrayList;
import java.util.List;

/** A conversation, oldest message first; the model's own template puts it into words. */
public final class Chat {
  private final List<ChatMessage> messages = new ArrayList<>();

  public Chat system(String content) {
    return add(message("system", content));
  }

  public Chat user(String content) {
    return add(message("user", content));
  }

  public Chat assistant(String content) {
    return add(message("assistant", content));
  }

  /** An output as a turn of the conversation, with the calls that it asks for. Reasoning is left out. */
  public Chat assistant(Output output) {
    var hasParts = !output.content().isEmpty() || !output.reasoning().isEmpty() || !output.toolCalls().isEmpty();
    var turn = message("assistant", hasParts ? output.content() : output.text());
    output.toolCalls().forEach(call -> turn.addToolCalls(call.toProto()));
    return add(turn);
  }

  /** An answer that asks for tool calls: a JSON array in the template's own form. */
  public Chat assistant(String content, String toolCallsJson) {
    return add(message("assistant", content).setToolCallsJson(toolCallsJson));
  }

  /** What the tool of a call returned. */
  public Chat tool(ToolCall call, String content) {
    return add(message("tool", content).setName(call.name()).setToolCallId(call.id()));
  }

  /** The result of the tool call {@code toolCallId}. */
  public Chat tool(String toolCallId, String content) {
    return add(message("tool", content).setToolCallId(toolCallId));
  }

  /** A message of any role, name and further fields. */
  public Chat add(ChatMessage.Builder message) {
    messages.add(message.build());
    return this;
  }

  ChatInput toProto() {
    return ChatInput.newBuilder().addAllMessages(messages).build();
  }

  private static ChatMessage.Builder message(String role, String content) {
    return ChatMessage.newBuilder().setRole(role).setContent(content);
  }
}
