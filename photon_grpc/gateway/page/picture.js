// The live picture: frames in, canvases and a table out.

import { element } from "./answer.js";
import { drawSpark, drawSquares, legendColours } from "./drawing.js";
import { Feed } from "./feed.js";
import { History, WINDOW_S } from "./history.js";
import { Lanes } from "./lanes.js";

const $ = (id) => document.getElementById(id);
const BLOCKS = ["owned", "cached", "limbo", "free"];
/** Least pause between drawings: five a second cost half of ten, where a browser draws without a GPU. */
const PAUSE_MS = 150;
/** For readers who want little motion. */
const CALM_MS = 1000;
/** Numbers that change more often cannot be read. */
const NUMBERS_MS = 500;
const TABLE_MS = 1000;

const EXPLAINED = {
  blocks: "Squares are sorted by what they are: owned by a running sequence, cached, in limbo, free. They are not at "
    + "their addresses: any free block serves any sequence, which is the point of paging.",
  "tile-tokens": "Tokens written in a second, by all sequences together. It grows with the lanes in use, since a step "
    + "for many takes little longer than a step for one.",
  "tile-step": "The time of one step. A step that also reads a prompt takes longer; this is what the "
    + "others pay for a newcomer.",
  "tile-queue": "Requests that wait for a slot or for memory. They are admitted as soon as one ends.",
};

export class Picture {
  constructor() {
    this.history = new History();
    this.lanes = new Lanes($("lanes"), explain);
    this.motion = matchMedia("(prefers-reduced-motion: reduce)");
    this.isPaused = false;
    this.drawn_ms = 0;
    this.isAsked = false;
    /** The frames that the numbers and the table show. */
    this.shown = { numbers: null, table: null };
    this.recolour();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
    new ResizeObserver(() => this.recolour()).observe($("lanes"));
    $("pause").addEventListener("click", () => this.#togglePause());
    for (const [id, words] of Object.entries(EXPLAINED)) explainOn($(id), words);
    $("summary").addEventListener("toggle", () => this.#fillTable());
    setInterval(() => this.#showNumbers(), NUMBERS_MS);
    setInterval(() => this.#fillTable(), TABLE_MS);
    this.feed = new Feed((frame) => this.#take(frame), showState);
    Object.defineProperty(window, "photonPicture", { get: () => this.summary() });
  }

  recolour() {
    this.colours = legendColours();
    this.shown.numbers = null;
    this.draw();
    this.#showNumbers();
  }

  #take(frame) {
    this.history.add(frame);
    if (this.isPaused || this.isAsked) return;
    this.isAsked = true;
    const pause_ms = this.motion.matches ? CALM_MS : PAUSE_MS;
    setTimeout(() => this.draw(), Math.max(0, this.drawn_ms + pause_ms - performance.now()));
  }

  draw() {
    this.isAsked = false;
    this.drawn_ms = performance.now();
    this.lanes.draw(this.history, this.colours);
  }

  #showNumbers() {
    const { frame } = this.history;
    if (this.isPaused || !frame || frame === this.shown.numbers) return;
    this.shown.numbers = frame;
    this.#drawBlocks(frame);
    this.#drawTiles(this.history);
  }

  #drawBlocks({ blocks, num_blocks, block_size }) {
    const drawn = Math.min(num_blocks, squaresFor(num_blocks - blocks.free));
    const parts = BLOCKS.map((name) => [blocks[name], this.colours[name]]);
    const unit = drawSquares($("blocks"), parts, drawn);
    for (const name of BLOCKS) setText($(`num-${name}`), blocks[name]);
    const square = unit === 1 ? "one block" : `${unit} blocks`;
    setText($("block-scale"), `A block holds ${block_size} tokens; a square is ${square} of ${num_blocks}`
      + `${drawn < num_blocks ? `, and ${num_blocks - drawn} free ones more are not drawn` : ""}.`);
  }

  #drawTiles({ samples, frame }) {
    const spark = (id, of, colour) => {
      const points = samples.map((sample) => [sample.at_s, of(sample)]);
      drawSpark($(id), points, frame.time_s - WINDOW_S, frame.time_s, colour);
    };
    spark("spark-tokens", (sample) => sample.tokens_per_s, this.colours.decode);
    spark("spark-step", (sample) => sample.step_ms, this.colours.prefill);
    spark("spark-queue", (sample) => sample.queued, this.colours.preempted);
    const step_ms = samples.at(-1).step_ms;
    setText($("now-tokens"), frame.output_tokens_per_s.toFixed(0));
    setText($("now-step"), step_ms === null ? "idle" : `${step_ms.toFixed(1)} ms`);
    setText($("now-queue"), frame.queued);
  }

  #fillTable() {
    const { frame } = this.history;
    if (this.isPaused || !$("summary").open || !frame || frame === this.shown.table) return;
    this.shown.table = frame;
    const rows = tableRows(this.history).map(([name, words]) => {
      const row = document.createElement("tr");
      const head = element("th", "", name);
      head.scope = "row";
      row.append(head, element("td", "", words));
      return row;
    });
    $("summary-rows").replaceChildren(...rows);
  }

  #togglePause() {
    this.isPaused = !this.isPaused;
    $("pause").setAttribute("aria-pressed", this.isPaused);
    $("pause").textContent = this.isPaused ? "Go on" : "Pause";
    if (!this.isPaused) this.recolour();
  }

  /** What is drawn, as plain data: for tests, and for the curious at the console. */
  summary() {
    const { lanes, frame, totals, samples } = this.history;
    return {
      totals: { ...totals },
      lanes: [...lanes].map(([slot, lane]) => ({
        slot,
        segments: lane.segments.map((segment) => ({ ...segment })),
        marks: lane.marks.map((mark) => ({ ...mark })),
      })),
      samples: samples.length,
      blocks: frame && { ...frame.blocks },
      queued: frame?.queued,
    };
  }
}

/** Squares to draw for so many blocks in use: at least twice as many, in powers of two, so that growth is seen. */
function squaresFor(numInUse) {
  return Math.max(128, 2 ** Math.ceil(Math.log2(2 * numInUse + 1)));
}

function tableRows(history) {
  const { frame, samples } = history;
  const { owned, cached, limbo, free } = frame.blocks;
  const step_ms = samples.at(-1).step_ms;
  const [written, read] = [frame.output_tokens_per_s, frame.prompt_tokens_per_s].map((rate) => rate.toFixed(0));
  const inUse = history.inUse;
  return [
    ["Slots in use", `${inUse.length} of ${frame.num_slots}`],
    ["Requests in the queue", frame.queued],
    ["Blocks", `${owned} owned, ${cached} cached, ${limbo} in limbo, ${free} free of ${frame.num_blocks}`],
    ["Step time", step_ms === null ? "idle" : `${step_ms.toFixed(1)} ms`],
    ["Tokens per second", `${written} written, ${read} read`],
    ...inUse.slice(0, 64).map(([slot, { sequence, prompt, cached: hit, output }, kind]) => [
      `Slot ${slot}`,
      `sequence ${sequence}: ${kind}, prompt of ${prompt} tokens (${hit} from the cache), ${output} written`,
    ]),
  ];
}

function explainOn(shown, words) {
  for (const name of ["pointerenter", "focus"]) shown.addEventListener(name, () => explain(words));
}

function explain(words) {
  if (words) setText($("explained"), words);
}

function showState(words, isLive) {
  setText($("feed-state"), words);
  $("feed-state").dataset.live = isLive;
}

function setText(shown, words) {
  if (shown.textContent !== String(words)) shown.textContent = words;
}
