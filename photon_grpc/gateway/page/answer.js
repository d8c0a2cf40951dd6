// One answer on the page, from its request to its figures. Text of the model becomes text nodes only.

import { CallError } from "./calls.js";
import { generation } from "./generation.js";

/** Make an element with a class and a text. */
export function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

export class Answer {
  constructor(title, isPlain) {
    this.element = element("article", isPlain ? "turn plain" : "turn");
    this.textNode = document.createTextNode("");
    this.textElement = element("div", "text");
    this.textElement.append(this.textNode);
    this.figures = element("p", "figures", "waiting for the first token …");
    this.element.append(element("h4", "", title), this.textElement, this.figures);
    this.abort = new AbortController();
    this.error = null;
    this.tools = new Map();
    this.times = { start: 0, first: 0, last: 0 };
    this.finish = "";
    this.usage = null;
  }

  get text() {
    return this.textNode.data;
  }

  stop() {
    this.abort.abort();
  }

  /** Stream until the end, a stop or an error; errors are shown, not thrown. */
  async run(model, ask, onPiece = () => {}) {
    this.element.setAttribute("aria-busy", "true");
    this.times.start = performance.now();
    try {
      for await (const [kind, value] of generation(model, ask, this.abort.signal)) {
        this.#take(kind, value);
        onPiece();
      }
    } catch (error) {
      if (error.name === "AbortError") this.finish = "stopped here";
      else this.#fail(error);
    }
    this.element.removeAttribute("aria-busy");
    this.figures.textContent = this.#figures();
    onPiece();
  }

  #take(kind, value) {
    if (kind === "usage") this.usage = value;
    else if (kind === "finish") this.finish = value;
    else this.#mark();
    if (kind === "text") this.textNode.appendData(value);
    if (kind === "reasoning") this.#thoughts().append(value);
    if (kind === "tool") this.#addTool(value);
  }

  #mark() {
    const now = performance.now();
    if (!this.times.first) {
      this.times.first = now;
      this.figures.textContent = `first token after ${milliseconds(now - this.times.start)}`;
    }
    this.times.last = now;
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
    this.error = error instanceof CallError ? error : new CallError(`The page cannot read the answer: ${error.message}`);
    const shown = element("p", "error", this.error.inFull);
    shown.setAttribute("role", "alert");
    this.figures.before(shown);
  }

  /** In words: what ended it, the time to the first token, tokens a second after it. */
  #figures() {
    const { start, first, last } = this.times;
    const tokens = this.usage?.completion_tokens;
    const words = [];
    if (first) words.push(`first token after ${milliseconds(first - start)}`);
    if (tokens > 1 && last > first) words.push(`${((tokens - 1) / ((last - first) / 1000)).toFixed(0)} tokens/s`);
    if (tokens !== undefined) words.push(`${this.usage.prompt_tokens} tokens read, ${tokens} written`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) words.push(`${cached} from the cache`);
    if (this.finish) words.push(FINISHES[this.finish] ?? `ended: ${this.finish}`);
    return words.join(" · ");
  }
}

const FINISHES = {
  stop: "ended by itself (stop)",
  length: "reached the most tokens (length)",
  tool_calls: "calls a tool (tool_calls)",
};

function milliseconds(value) {
  return value < 1000 ? `${value.toFixed(0)} ms` : `${(value / 1000).toFixed(2)} s`;
}
