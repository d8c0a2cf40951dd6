// Many requests at once, of different lengths, so that the picture shows how they share the engine.

import { Answer, stream } from "./answer.js";
import { parameters } from "./chat.js";

const $ = (id) => document.getElementById(id);

/**
 * A browser opens six connections to a server at most. The feed has one and the chat may have one, so the prompts go
 * out in four calls with several prompts each; in the engine, every prompt is a sequence of its own.
 */
const NUM_CALLS = 4;
/** The most tokens of a prompt in each call; the least are three quarters of them, so that there is something to see. */
const LENGTHS = [48, 110, 190, 300];

/** The beginning of some prompts: long enough to see its prefill, and equal, so that the cache may have it. */
const PREFACE = `# A service that writes text for many people at once keeps a batch. In each step, the engine
# computes one more token for every request in the batch. A request that arrives joins the batch at the next step, and
# one that ends leaves at once, so that nobody waits for the longest answer. The keys and values of past tokens are kept
# in blocks of a fixed size. A table names the blocks of each request, as an operating system maps pages of memory. Two
# requests that begin with the same text share the blocks of that text, and the second does not compute it again. When
# the blocks run out, the request that came last gives its blocks back, waits, and is computed again later.
`;
const PROMPTS = [
  "def largest(items):\n",
  "class Stack:\n",
  `${PREFACE}def count_words(text):\n`,
  "class Queue:\n",
  "def fibonacci(n):\n",
  "def reverse(text):\n",
  `${PREFACE}def longest_word(text):\n`,
  "class Matrix:\n",
];
const NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];

export class Many {
  constructor(serving) {
    this.serving = serving;
    this.abort = null;
    $("run-many").addEventListener("click", () => this.run());
    $("stop-many").addEventListener("click", () => this.stop());
    $("parallel").addEventListener("input", nameButton);
    nameButton();
  }

  stop() {
    this.abort?.abort();
  }

  async run() {
    if (!this.serving.model || this.abort) return;
    const begin_ms = performance.now();
    this.abort = new AbortController();
    updateButtons(true);
    $("many-total").textContent = "";
    const usages = await Promise.all(this.#calls().map((ask) => this.#call(ask)));
    const tokens = usages.reduce((sum, usage) => sum + (usage?.completion_tokens ?? 0), 0);
    const seconds = (performance.now() - begin_ms) / 1000;
    if (tokens) $("many-total").textContent = `Together: ${tokens} tokens in ${seconds.toFixed(1)} s, `
      + `${(tokens / seconds).toFixed(0)} tokens/s.`;
    this.abort = null;
    updateButtons(false);
  }

  /** Deal the prompts to the calls; show an empty answer for each. */
  #calls() {
    const numbers = [...Array(count()).keys()];
    const answers = numbers.map((number) => new Answer(titleOf(number), true));
    $("many-answers").replaceChildren(...answers.map((answer) => answer.element));
    const calls = numbers.slice(0, NUM_CALLS).map((first) => numbers.filter((number) => number % NUM_CALLS === first));
    return calls.map((dealt, place) => ({
      prompts: dealt.map((number) => PROMPTS[number % PROMPTS.length]),
      parameters: { ...parameters(), max_tokens: LENGTHS[place], min_tokens: Math.floor(LENGTHS[place] * 0.75) },
      answers: dealt.map((number) => answers[number]),
    }));
  }

  #call({ answers, ...ask }) {
    const follow = (answer) => (answer.textElement.scrollTop = answer.textElement.scrollHeight);
    return stream(this.serving.model, ask, answers, this.abort.signal, follow);
  }
}

function count() {
  return Math.min(64, Math.max(1, Math.round(Number($("parallel").value)) || 8));
}

/** The number and the line of the prompt that says what is wanted. */
function titleOf(number) {
  return `${number + 1}. ${PROMPTS[number % PROMPTS.length].match(/^(?:def|class) .*(?=:$)/m)[0]}`;
}

function nameButton() {
  $("run-many").textContent = `Run ${NUMBERS[count()] ?? count()} request${count() === 1 ? "" : "s"}`;
}

function updateButtons(isRunning) {
  $("run-many").disabled = isRunning;
  $("stop-many").disabled = !isRunning;
}
