// OpenAI's client for Node at an HTTP server: openai_chat.mjs BASE_URL MODEL. Ends with 0 if all answers are right.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseUrl, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Is it raining in Oslo?" }];
const common = { model, messages, temperature: 0, max_completion_tokens: 60 };
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 8 } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

const whole = await client.chat.completions.create(common);
const content = whole.choices[0].message.content;
assert.ok(content.length > 0 && whole.usage.completion_tokens > 0);

// Streams: by chunks, and by the helper, which gathers them.
let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...common,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
assert.equal((await client.chat.completions.stream(common).finalChatCompletion()).choices[0].message.content, content);

// Tools: a call out, its result back in, and the same in a stream.
const asked = await client.chat.completions.create({ ...common, tools: [weather], tool_choice: "required", parallel_tool_calls: false });
const [call] = asked.choices[0].message.tool_calls;
assert.equal(asked.choices[0].finish_reason, "tool_calls");
assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
const turns = [...messages, asked.choices[0].message, { role: "tool", tool_call_id: call.id, content: "no" }];
assert.ok((await client.chat.completions.create({ ...common, messages: turns, tools: [weather] })).choices.length === 1);
const streamedCall = await client.chat.completions
  .stream({ ...common, tools: [weather], tool_choice: "required", parallel_tool_calls: false })
  .finalChatCompletion();
assert.deepEqual(streamedCall.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);

// Completions and models.
const plain = await client.completions.create({ model, prompt: ["a", "b"], max_tokens: 4, logprobs: 1 });
assert.deepEqual(plain.choices.map((each) => each.index), [0, 1]);
assert.deepEqual((await client.models.list()).data.map((each) => each.id), [model]);

// Errors are the client's own classes.
await assert.rejects(client.chat.completions.create({ ...common, model: "gpt-9" }), (error) => {
  return error instanceof OpenAI.NotFoundError && error.code === "MODEL_NOT_FOUND" && error.requestID.length > 0;
});
await assert.rejects(client.chat.completions.create({ ...common, n: 0 }), (error) => {
  return error instanceof OpenAI.BadRequestError && error.param === "n";
});

// Leaving a stream ends it.
const left = await client.chat.completions.create({ ...common, stream: true, max_completion_tokens: 500 });
for await (const chunk of left) break;
console.log("all answers are right");
