// One call for one answer or several: what is asked in OpenAI's form, and the pieces that stream back.

import { call, CallError, events, parsed } from "./calls.js";

/**
 * Yield [index, kind, value] of each piece: reasoning, text, tool (a part of a tool call), finish, usage.
 *
 * ask: {messages: [{role, content}]} for a chat or {prompts: [text]} to continue texts, and {parameters}.
 */
export async function* generation(model, ask, signal) {
  const path = ask.messages ? "/v1/chat/completions" : "/v1/completions";
  const response = await call(path, { body: bodyOf(model, ask), signal });
  let numOpen = ask.prompts?.length ?? 1;
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = parsed(data);
    for (const choice of chunk.choices ?? []) {
      for (const [kind, value] of pieces(choice)) yield [choice.index, kind, value];
      if (choice.finish_reason) numOpen -= 1;
    }
    if (chunk.usage) yield [0, "usage", chunk.usage];
  }
  if (numOpen > 0) throw new CallError("The stream ended before the answer did.");
}

function* pieces(choice) {
  const delta = choice.delta ?? { content: choice.text };
  if (delta.reasoning_content) yield ["reasoning", delta.reasoning_content];
  if (delta.content) yield ["text", delta.content];
  if (delta.refusal) yield ["text", delta.refusal];
  for (const tool of delta.tool_calls ?? []) yield ["tool", tool];
  if (choice.finish_reason) yield ["finish", choice.finish_reason];
}

/** Parameters that are undefined are left out of the JSON. */
function bodyOf(model, { messages, prompts, parameters: { system, max_tokens, ...parameters } }) {
  const body = { model: model.id, stream: true, stream_options: { include_usage: true }, ...parameters };
  if (!messages) return { ...body, prompt: prompts.length === 1 ? prompts[0] : prompts, max_tokens };
  const first = system ? [{ role: "system", content: system }] : [];
  return { ...body, messages: [...first, ...messages], max_completion_tokens: max_tokens };
}
