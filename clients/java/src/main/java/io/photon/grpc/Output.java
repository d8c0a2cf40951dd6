package io.photon.grpc;

import com.google.protobuf.Message;
import io.photon.grpc.v1.TypedMessage;
import java.util.List;

/**
 * One whole output. {@code tokenIds} and {@code scores} are there where the request asks for them; {@code reasoning},
 * {@code content} and {@code toolCalls} are the parts of a chat's text, where the model has them. {@code message} is
 * that of typed output, and {@code usage} counts the tokens of this output; null where the server sent none.
 */
public record Output(
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
  static Output of(io.photon.grpc.v1.Output message, boolean withTokenIds) {
    return new Output(
        message.getIndex(),
        message.getText(),
        withTokenIds ? List.copyOf(message.getTokenIdsList()) : List.of(),
        Finish.of(message.getFinish()),
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
