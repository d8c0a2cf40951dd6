package io.photon.grpc;

import com.google.protobuf.Message;
import io.photon.grpc.v1.TypedMessage;
import java.util.List;

/**
 * New text, ids and scores of one output. The joined texts of an index are its whole text; {@code finish} is null until
 * the output's last delta. {@code reasoning}, {@code content} and {@code toolCalls} are the parts of a chat's text,
 * where the model has them. {@code message} and {@code usage} come with the last delta; null before.
 */
public record Delta(
    int index,
    String text,
    List<Integer> tokenIds,
    Finish finish,
    List<TokenScore> scores,
    String reasoning,
    String content,
    List<ToolCall> toolCalls,
    TypedMessage message,
    OutputUsage usage) {
  /** Ids that only the client asked for, to resume, are not told. */
  static Delta of(io.photon.grpc.v1.Output message, boolean withTokenIds) {
    return new Delta(
        message.getIndex(),
        message.getText(),
        withTokenIds ? List.copyOf(message.getTokenIdsList()) : List.of(),
        message.hasFinish() ? Finish.of(message.getFinish()) : null,
        TokenScore.of(message.getScoresList()),
        message.getReasoning(),
        message.getContent(),
        ToolCall.of(message.getToolCallsList()),
        message.hasMessage() ? message.getMessage() : null,
        message.hasUsage() ? OutputUsage.of(message.getUsage()) : null);
  }

  /** The typed message; throw WrongMessageType where it is of another type, MessageMismatch where there is none. */
  public <T extends Message> T message(Class<T> type) {
    return TypedMessages.unpack(message, type);
  }
}
