package io.photon.grpc;

import com.google.protobuf.Message;
import io.photon.grpc.v1.CacheOptions;
import io.photon.grpc.v1.ChatInput;
import io.photon.grpc.v1.GenerateRequest;
import io.photon.grpc.v1.OutputOptions;
import io.photon.grpc.v1.SamplingParams;
import io.photon.grpc.v1.SchedulingOptions;
import io.photon.grpc.v1.StopParams;
import io.photon.grpc.v1.StreamOptions;
import io.photon.grpc.v1.StructuredOutput;
import io.photon.grpc.v1.TokenIds;
import io.photon.grpc.v1.ToolChoice;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.function.Consumer;

/**
 * A prompt and what to make of it. Options are named like the fields of the proto, wherever they stand in it; unset
 * means the model's defaults, and docs/api.md says what each means. A call takes a copy: the same request may be sent
 * again, changed or not. Not for several threads at a time.
 */
public final class Request {
  private final GenerateRequest.Builder proto;
  private Duration timeout;
  private Duration hedgeAfter;

  private Request(GenerateRequest.Builder proto) {
    this.proto = proto;
  }

  /** Plain text to go on from. */
  public static Request text(String text) {
    return new Request(GenerateRequest.newBuilder().setText(text));
  }

  /** Token ids to go on from; nothing is added to them. */
  public static Request tokenIds(List<Integer> ids) {
    return new Request(GenerateRequest.newBuilder().setTokenIds(ids(ids)));
  }

  /** A conversation to answer. */
  public static Request chat(Chat chat) {
    return new Request(GenerateRequest.newBuilder().setChat(chat.toProto()));
  }

  /** A message made with the stubs, with every field that has no setter here. */
  public static Request of(GenerateRequest message) {
    return new Request(message.toBuilder());
  }

  public Request model(String model) {
    proto.setModel(model);
    return this;
  }

  public Request requestId(String requestId) {
    proto.setRequestId(requestId);
    return this;
  }

  /**
   * Notes beside the request: in the server's request log and spans, and in metrics for the labels that its operator
   * allows.
   */
  public Request labels(Map<String, String> labels) {
    proto.clearLabels().putAllLabels(labels);
    return this;
  }

  public Request parseSpecialTokens(boolean parse) {
    proto.setParseSpecialTokens(parse);
    return this;
  }

  public Request continueFrom(List<Integer> ids) {
    proto.setContinueFrom(ids(ids));
    return this;
  }

  public Request temperature(double temperature) {
    sampling().setTemperature((float) temperature);
    return this;
  }

  public Request topP(double topP) {
    sampling().setTopP((float) topP);
    return this;
  }

  public Request topK(int topK) {
    sampling().setTopK(topK);
    return this;
  }

  public Request minP(double minP) {
    sampling().setMinP((float) minP);
    return this;
  }

  public Request repetitionPenalty(double penalty) {
    sampling().setRepetitionPenalty((float) penalty);
    return this;
  }

  public Request presencePenalty(double penalty) {
    sampling().setPresencePenalty((float) penalty);
    return this;
  }

  public Request frequencyPenalty(double penalty) {
    sampling().setFrequencyPenalty((float) penalty);
    return this;
  }

  /** An unsigned 64-bit number. */
  public Request seed(long seed) {
    sampling().setSeed(seed);
    return this;
  }

  public Request logitBias(Map<Integer, Float> bias) {
    sampling().putAllLogitBias(bias);
    return this;
  }

  public Request allowedTokenIds(List<Integer> ids) {
    sampling().setAllowedTokenIds(ids(ids));
    return this;
  }

  /** A stream of more than one output cannot be resumed. */
  public Request numOutputs(int numOutputs) {
    sampling().setNumOutputs(count("sampling.num_outputs", numOutputs));
    return this;
  }

  public Request maxTokens(int maxTokens) {
    stop().setMaxTokens(count("stop.max_tokens", maxTokens));
    return this;
  }

  public Request minTokens(int minTokens) {
    stop().setMinTokens(count("stop.min_tokens", minTokens));
    return this;
  }

  public Request stopStrings(String... stopStrings) {
    stop().addAllStopStrings(Arrays.asList(stopStrings));
    return this;
  }

  public Request stopTokenIds(List<Integer> ids) {
    stop().addAllStopTokenIds(ids);
    return this;
  }

  public Request ignoreEos(boolean ignore) {
    stop().setIgnoreEos(ignore);
    return this;
  }

  public Request includeStopInText(boolean include) {
    stop().setIncludeStopInText(include);
    return this;
  }

  public Request maxDuration(Duration maxDuration) {
    stop().setMaxDuration(Durations.write(maxDuration));
    return this;
  }

  /** One constraint at a time: the last one set counts. */
  public Request jsonSchema(String schema) {
    structuredOutput().setJsonSchema(schema);
    return this;
  }

  public Request jsonObject() {
    structuredOutput().setJsonObject(StructuredOutput.JsonObject.getDefaultInstance());
    return this;
  }

  public Request regex(String regex) {
    structuredOutput().setRegex(regex);
    return this;
  }

  public Request choices(String... choices) {
    structuredOutput()
        .setChoices(StructuredOutput.Choices.newBuilder().addAllValues(Arrays.asList(choices)));
    return this;
  }

  public Request grammar(String grammar) {
    structuredOutput().setGrammar(grammar);
    return this;
  }

  public Request text(boolean text) {
    output().setText(text);
    return this;
  }

  public Request tokenIds(boolean tokenIds) {
    output().setTokenIds(tokenIds);
    return this;
  }

  public Request promptTokenIds(boolean promptTokenIds) {
    output().setPromptTokenIds(promptTokenIds);
    return this;
  }

  public Request logprobs(int best) {
    output().setLogprobs(count("output.logprobs", best));
    return this;
  }

  public Request promptLogprobs(int best) {
    output().setPromptLogprobs(count("output.prompt_logprobs", best));
    return this;
  }

  public Request scoreTokenIds(List<Integer> ids) {
    output().setScoreTokenIds(ids(ids));
    return this;
  }

  public Request skipSpecialTokens(boolean skip) {
    output().setSkipSpecialTokens(skip);
    return this;
  }

  public Request sessionId(String sessionId) {
    cache().setSessionId(sessionId);
    return this;
  }

  public Request salt(String salt) {
    cache().setSalt(salt);
    return this;
  }

  public Request bypassPrefixCache(boolean bypass) {
    cache().setBypassPrefixCache(bypass);
    return this;
  }

  public Request priority(int priority) {
    scheduling().setPriority(priority);
    return this;
  }

  public Request maxQueueDuration(Duration maxQueueDuration) {
    scheduling().setMaxQueueDuration(Durations.write(maxQueueDuration));
    return this;
  }

  /** Most tokens that a step drafts for an output; 0: none. Unset: as many as pay. */
  public Request speculation(int most) {
    scheduling().setSpeculation(count("scheduling.speculation", most));
    return this;
  }

  /** The deadline of the call, here and on the server. Unset: the gRPC context's, else the client's default. */
  public Request timeout(Duration timeout) {
    this.timeout = timeout;
    return this;
  }

  public Request minInterval(Duration minInterval) {
    streaming().setMinInterval(Durations.write(minInterval));
    return this;
  }

  public Request maxTokensPerMessage(int maxTokens) {
    streaming().setMaxTokensPerMessage(count("stream.max_tokens_per_message", maxTokens));
    return this;
  }

  public Request continuousUsage(boolean continuous) {
    streaming().setContinuousUsage(continuous);
    return this;
  }

  /** Messages before the first token, for proxies that close an idle stream; nobody sees them. */
  public Request heartbeatInterval(Duration interval) {
    streaming().setHeartbeatInterval(Durations.write(interval));
    return this;
  }

  /** Variables for the chat's template: a JSON object. */
  public Request templateArgsJson(String json) {
    chat("template_args_json").setTemplateArgsJson(json);
    return this;
  }

  /** Tools in the template's own form, a JSON array; in place of {@code tools}. */
  public Request toolsJson(String json) {
    chat("tools_json").setToolsJson(json);
    return this;
  }

  /** Tools whose arguments are messages: a class and what its tool does; a tool is named like its message. */
  public Request tools(Map<Class<? extends Message>, String> tools) {
    return tools(tools.entrySet().stream().map(tool -> Tool.of(tool.getKey(), tool.getValue())).toArray(Tool[]::new));
  }

  /** Tools that the model may call. Calls come as {@link ToolCall}s; {@link Chat} takes them and their answers. */
  public Request tools(Tool... tools) {
    var chat = chat("tools").clearTools();
    Arrays.stream(tools).forEach(tool -> chat.addTools(tool.toProto()));
    return this;
  }

  /** {@code "auto"} (unset), {@code "required"} or the name of the tool that is called. */
  public Request toolChoice(String choice) {
    var chat = chat("tool_choice");
    switch (choice) {
      case "auto" -> chat.clearToolChoice();
      case "required" -> chat.getToolChoiceBuilder().setRequired(ToolChoice.Required.getDefaultInstance());
      default -> chat.getToolChoiceBuilder().setName(choice);
    }
    return this;
  }

  public Request addGenerationPrompt(boolean add) {
    chat("add_generation_prompt").setAddGenerationPrompt(add);
    return this;
  }

  /**
   * {@code generate} asks the next replica where the first has not answered within {@code wait}; the first answer wins,
   * and the other call is cancelled. Of a {@link Client} alone: a {@link Multiplex} is one replica's.
   */
  public Request hedgeAfter(Duration wait) {
    hedgeAfter = wait;
    return this;
  }

  /** The message as it is sent. */
  public GenerateRequest toProto() {
    return proto.build();
  }

  /** A copy with a change. */
  Request with(Consumer<GenerateRequest.Builder> change) {
    var copy = new Request(proto.clone());
    copy.timeout = timeout;
    copy.hedgeAfter = hedgeAfter;
    change.accept(copy.proto);
    return copy;
  }

  boolean asksForTokenIds() {
    return proto.getOutput().getTokenIds();
  }

  Duration timeout() {
    return timeout;
  }

  Duration hedgeAfter() {
    return hedgeAfter;
  }

  /** A negative number would be sent as one of billions. */
  private static int count(String field, int count) {
    if (count < 0) {
      throw new PhotonException.InvalidRequest(field, count + " is negative");
    }
    return count;
  }

  private static TokenIds ids(List<Integer> ids) {
    return TokenIds.newBuilder().addAllIds(ids).build();
  }

  private SamplingParams.Builder sampling() {
    return proto.getSamplingBuilder();
  }

  private StopParams.Builder stop() {
    return proto.getStopBuilder();
  }

  private StructuredOutput.Builder structuredOutput() {
    return proto.getStructuredOutputBuilder();
  }

  private OutputOptions.Builder output() {
    return proto.getOutputBuilder();
  }

  private CacheOptions.Builder cache() {
    return proto.getCacheBuilder();
  }

  private SchedulingOptions.Builder scheduling() {
    return proto.getSchedulingBuilder();
  }

  private StreamOptions.Builder streaming() {
    return proto.getStreamBuilder();
  }

  private ChatInput.Builder chat(String option) {
    if (!proto.hasChat()) {
      throw new PhotonException.InvalidRequest("chat." + option, "the prompt is no chat");
    }
    return proto.getChatBuilder();
  }
}
