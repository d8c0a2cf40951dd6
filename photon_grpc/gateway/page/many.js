// Many requests at once, of different lengths, so that the picture shows how they share the engine.

import { Answer } from "./answer.js";
import { parameters } from "./chat.js";

const $ = (id) => document.getElementById(id);

/** The beginning of some of the prompts: long enough to see its prefill, and the same, so that the cache has it. */
const PREFACE = `A service that writes text for many people at once keeps a batch. In each step the engine computes one
more token for every request in the batch. A request that arrives joins the batch at the next step, and one that ends
leaves at once, so that nobody waits for the longest answer. The keys and values of past tokens are kept in blocks of a
fixed size. A table names the blocks of each request, as an operating system maps pages of memory. Two requests that
begin with the same text share the blocks of that text, and the second does not compute it again. When the blocks run
out, the request that came last gives its blocks back, waits, and is computed again later, and nobody notices.`;

/** [question, most tokens, whether it begins with the preface] */
const ASKS = [
  ["Return the largest item of a list.", 40, false],
  ["Return the sum of the squares of a list.", 220, false],
  ["Count the words of the text above.", 90, true],
  ["Write a class for a stack with push and pop.", 300, false],
  ["Return the n-th number of Fibonacci.", 60, false],
  ["Write a function that reverses a string.", 130, false],
  ["Return the longest word of the text above.", 180, true],
  ["Sort a list of numbers without sort().", 260, false],
];
const NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"];

export class Many {
  constructor(serving) {
    this.serving = serving;
    this.running = new Set();
    $("run-many").addEventListener("click", () => this.run());
    $("stop-many").addEventListener("click", () => this.stop());
    $("parallel").addEventListener("input", () => this.#label());
    this.#label();
  }

  stop() {
    for (const answer of this.running) answer.stop();
  }

  run() {
    if (!this.serving.model || this.running.size) return;
    $("many").replaceChildren();
    for (let number = 0; number < count(); number++) this.#start(number);
    this.#updateButtons();
  }

  async #start(number) {
    const model = this.serving.model;
    const [question, max_tokens, hasPreface] = ASKS[number % ASKS.length];
    const answer = new Answer(`${number + 1}. ${question}`, !model.hasChat);
    $("many").append(answer.element);
    this.running.add(answer);
    const wanted = model.hasChat ? question : `# ${question}\n`;
    const content = hasPreface ? `${PREFACE}\n\n${wanted}` : wanted;
    const ask = { messages: [{ role: "user", content }], parameters: { ...parameters(), max_tokens } };
    await answer.run(model, ask, () => (answer.textElement.scrollTop = answer.textElement.scrollHeight));
    this.running.delete(answer);
    this.#updateButtons();
  }

  #label() {
    $("run-many").textContent = `Run ${NUMBERS[count()] ?? count()} request${count() === 1 ? "" : "s"}`;
  }

  #updateButtons() {
    $("run-many").disabled = this.running.size > 0;
    $("stop-many").disabled = this.running.size === 0;
  }
}

function count() {
  return Math.min(64, Math.max(1, Math.round(Number($("parallel").value)) || 8));
}
