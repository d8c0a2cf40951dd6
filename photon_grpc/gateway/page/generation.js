// One generation: what is asked in OpenAI's form, and the pieces that stream back.

import { call, CallError, events, parsed } from "./calls.js";

/** Yield [kind, value] of each piece: reasoning, text, tool (a part of one call), finish, usage. */
export async function* generation(model, ask, signal) {
  const path = model.hasChat ? "/v1/chat/completions" : "/v1/completions";
  const response = await call(path, { body: bodyOf(model, ask), signal });
  let isFinished = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = parsed(data);
    for (const choice of chunk.choices ?? []) {
      yield* pieces(choice);
      isFinished ||= Boolean(choice.finish_reason);
    }
    if (chunk.usage) yield ["usage", chunk.usage];
  }
  if (!isFinished) throw new CallError("The stream ended before the answer did.");
}

function* pieces(choice) {
  const delta = choice.delta ?? { content: choice.text };
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning) yield ["reasoning", reasoning];
  if (delta.content) yield ["text", delta.content];
  if (delta.refusal) yield ["text", delta.refusal];
  for (const tool of delta.tool_calls ?? []) yield ["tool", tool];
  if (choice.finish_reason) yield ["finish", choice.finish_reason];
}

/** ask: {messages: [{role, content}], parameters: {temperature, …}}; undefined parameters are left out of the JSON. */
function bodyOf(model, ask) {
  const { system, max_tokens, ...parameters } = ask.parameters;
  const body = { model: model.id, stream: true, stream_options: { include_usage: true }, ...parameters };
  if (!model.hasChat) return { ...body, prompt: ask.messages.at(-1).content, max_tokens };
  const first = system ? [{ role: "system", content: system }] : [];
  return { ...body, messages: [...first, ...ask.messages], max_completion_tokens: max_tokens };
}
