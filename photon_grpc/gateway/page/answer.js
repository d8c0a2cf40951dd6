// Answers on the page, from the request to the figures. Text of the model becomes text nodes only.

import { CallError } from "./calls.js";
import { generation } from "./generation.js";

/** Make an element with a class and a text. */
export function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Stream one call into its answers until the end, a stop or an error, which is shown. Return the usage. */
export async function stream(model, ask, answers, signal, onPiece) {
  let usage = null;
  let error = null;
  try {
    for await (const [index, kind, value] of generation(model, ask, signal)) {
      if (kind === "usage") usage = value;
      else answers[index].take(kind, value);
      onPiece(answers[index]);
    }
  } catch (caught) {
    error = caught;
  }
  for (const answer of answers) answer.end(error, answers.length === 1 ? usage : null);
  return usage;
}

export class Answer {
  constructor(title, isPlain) {
    this.element = element("article", isPlain ? "turn plain" : "turn");
    this.element.setAttribute("aria-busy", "true");
    this.textNode = document.createTextNode("");
    this.textElement = element("div", "text");
    this.textElement.append(this.textNode);
    this.figures = element("p", "figures", "waiting for the first token …");
    this.element.append(element("h4", "", title), this.textElement, this.figures);
    this.error = null;
    this.tools = new Map();
    this.times_ms = { start: performance.now(), first: 0, last: 0, end: 0 };
    this.finish = "";
  }

  get text() {
    return this.textNode.data;
  }

  take(kind, value) {
    if (kind === "finish") this.#finish(value);
    else this.#mark();
    if (kind === "text") this.textNode.appendData(value);
    if (kind === "reasoning") this.#thoughts().append(value);
    if (kind === "tool") this.#addTool(value);
    if (kind === "finish") this.#showFigures();
  }

  end(error, usage) {
    this.element.removeAttribute("aria-busy");
    if (error?.name === "AbortError" && !this.finish) this.#finish("stopped here");
    else if (error && !this.finish) this.#fail(error);
    this.#showFigures(usage);
  }

  #finish(reason) {
    this.finish = reason;
    this.times_ms.end = performance.now();
  }

  #mark() {
    const now = performance.now();
    if (!this.times_ms.first) {
      this.times_ms.first = now;
      this.#showFigures();
    }
    this.times_ms.last = now;
  }

  #thoughts() {
    if (!this.thoughts) {
      const folded = element("details", "reasoning");
      this.thoughts = element("div", "text");
      folded.append(element("summary", "", "Reasoning"), this.thoughts);
      this.textElement.before(folded);
    }
    return this.thoughts;
  }

  #addTool({ index = 0, function: called = {} }) {
    if (!this.tools.has(index)) {
      this.tools.set(index, element("pre", "tool", "calls the tool "));
      this.figures.before(this.tools.get(index));
    }
    this.tools.get(index).append(called.name ? `${called.name} ` : "", called.arguments ?? "");
  }

  #fail(error) {
    const isCallError = error instanceof CallError;
    this.error = isCallError ? error : new CallError(`The page cannot read the answer: ${error.message}`);
    const shown = element("p", "error", this.error.inFull);
    shown.setAttribute("role", "alert");
    this.figures.before(shown);
  }

  /** Show the time to the first token, tokens a second after it, and what ended the answer. */
  #showFigures(usage) {
    const { start, first, last, end } = this.times_ms;
    const tokens = usage?.completion_tokens;
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    const words = [];
    if (first) words.push(`first token after ${duration(first - start)}`);
    if (tokens > 1 && last > first) words.push(`${((tokens - 1) / ((last - first) / 1000)).toFixed(0)} tokens/s`);
    if (usage) words.push(`${usage.prompt_tokens} tokens read, ${tokens} written`);
    if (cached) words.push(`${cached} from the cache`);
    if (this.finish) words.push(`${FINISHES[this.finish] ?? this.finish} after ${duration(end - start)}`);
    this.figures.textContent = words.join(" · ");
  }
}

const FINISHES = {
  stop: "ended by itself (stop)",
  length: "reached the most tokens (length)",
  tool_calls: "calls a tool (tool_calls)",
};

function duration(ms) {
  return ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
