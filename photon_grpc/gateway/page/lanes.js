// The batch over time: a lane for each slot, time from left to right, the newest step at the right edge.

import { cleared } from "./drawing.js";
import { WINDOW_S } from "./history.js";

const GUTTER = 26;
const AXIS = 16;
/** Lanes at least so high have room for numbers above their blocks. */
const HIGH = 20;
const FONT = "10px system-ui, sans-serif";

export class Lanes {
  constructor(canvas, onExplained) {
    this.canvas = canvas;
    this.onExplained = onExplained;
    /** The place the reader asks about: {slot, ago_s}. */
    this.cursor = null;
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#ask(null));
    canvas.addEventListener("keydown", (event) => this.#move(event));
    canvas.addEventListener("blur", () => this.#ask(null));
  }

  draw(history, colours) {
    this.history = history;
    this.now_s = history.frame?.time_s ?? 0;
    const { context, width, height } = cleared(this.canvas);
    Object.assign(this, { context, width, colours });
    this.count = numLanes(history);
    this.laneHeight = (height - AXIS) / this.count;
    context.font = FONT;
    this.#drawAxis(height);
    for (const [slot, lane] of history.lanes) if (slot < this.count) this.#drawLane(slot, lane);
    if (this.cursor) this.#drawCursor(height);
  }

  #x(at_s) {
    return GUTTER + Math.max(0, 1 - (this.now_s - at_s) / WINDOW_S) * (this.width - GUTTER);
  }

  #drawAxis(height) {
    const { context, colours, count, laneHeight } = this;
    context.fillStyle = colours.line;
    for (let slot = 0; slot <= count; slot++) context.fillRect(GUTTER, slot * laneHeight, this.width, 0.5);
    context.fillStyle = colours.ink;
    for (let ago_s = WINDOW_S; ago_s >= 0; ago_s -= WINDOW_S / 4) {
      const words = ago_s ? `−${ago_s} s` : "now";
      context.textAlign = ago_s === WINDOW_S ? "left" : ago_s ? "center" : "right";
      context.fillText(words, this.#x(this.now_s - ago_s), height - 4);
    }
    context.textAlign = "left";
    const every = Math.ceil(11 / laneHeight);
    const base = Math.min(11, laneHeight / 2 + 4);
    for (let slot = 0; slot < count; slot += every) context.fillText(slot, 4, slot * laneHeight + base);
  }

  #drawLane(slot, lane) {
    const { context, colours, laneHeight } = this;
    const title = laneHeight >= HIGH ? 10 : 0;
    const top = slot * laneHeight + 1 + title;
    const room = laneHeight - 2 - title;
    // Prefill last: it is often short, and widened to be seen.
    const forms = [["held", Math.min(2, room), 1], ["decode", room * 0.6, 1], ["prefill", room, 5]];
    for (const [kind, high, least] of forms) {
      context.fillStyle = colours[kind];
      for (const { from_s, to_s } of lane.segments.filter((segment) => segment.kind === kind)) {
        const x = this.#x(from_s);
        context.fillRect(x, top + (room - high) / 2, Math.max(least, this.#x(to_s) - x), high);
      }
    }
    this.labelled = 0;
    for (const mark of lane.marks) this.#drawMark(mark, top, room, title);
  }

  #drawMark({ kind, at_s, sequence, tokens }, top, room, title) {
    const { context, colours } = this;
    const x = this.#x(at_s);
    context.fillStyle = colours.ink;
    if (kind === "admitted" || kind === "ended") context.fillRect(x - 0.75, top, 1.5, room);
    if (kind === "admitted" && title) this.#label(`#${sequence}`, x, top - 2);
    if (kind === "hit") {
      context.fillStyle = colours.hit;
      context.beginPath();
      context.moveTo(x - 4, top);
      context.lineTo(x + 8, top);
      context.lineTo(x + 2, top + Math.min(8, room));
      context.fill();
      if (title) this.#label(`${tokens} cached`, x + 4 + context.measureText(`#${sequence}`).width, top - 2);
    }
    if (kind === "preempted") {
      const half = Math.min(5, room / 2);
      context.strokeStyle = colours.preempted;
      context.lineWidth = 2.5;
      context.beginPath();
      for (const sign of [-1, 1]) {
        context.moveTo(x - half, top + room / 2 - sign * half);
        context.lineTo(x + half, top + room / 2 + sign * half);
      }
      context.stroke();
    }
  }

  /** Write above a lane, unless something stands there already. */
  #label(words, x, y) {
    if (x < this.labelled) return;
    this.context.fillText(words, x, y);
    this.labelled = x + this.context.measureText(words).width + 3;
  }

  #drawCursor(height) {
    const { context, colours, cursor, laneHeight } = this;
    context.strokeStyle = colours.ink;
    context.lineWidth = 1;
    context.setLineDash([3, 3]);
    context.strokeRect(GUTTER, cursor.slot * laneHeight, this.width, laneHeight);
    context.strokeRect(this.#x(this.now_s - cursor.ago_s), 0, 0.01, height - AXIS);
    context.setLineDash([]);
  }

  // What the reader asks.

  #point(event) {
    const slot = Math.floor(event.offsetY / this.laneHeight);
    const part = (event.offsetX - GUTTER) / (this.width - GUTTER);
    this.#ask(slot < this.count && part >= 0 ? { slot, ago_s: (1 - Math.min(1, part)) * WINDOW_S } : null);
  }

  #move(event) {
    if (!(event.key in MOVES)) return;
    const [lanes, seconds] = MOVES[event.key];
    event.preventDefault();
    const { slot, ago_s } = this.cursor ?? { slot: 0, ago_s: 0 };
    if (!this.cursor) return this.#ask({ slot, ago_s });
    this.#ask({
      slot: Math.min(this.count - 1, Math.max(0, slot + lanes)),
      ago_s: Math.min(WINDOW_S, Math.max(0, ago_s + seconds)),
    });
  }

  #ask(cursor) {
    if (!cursor && !this.cursor) return;
    this.cursor = cursor;
    if (!this.history) return;
    this.draw(this.history, this.colours);
    this.onExplained(cursor ? this.explain(cursor) : "");
  }

  /** Say in words what a lane did at a time. */
  explain({ slot, ago_s }) {
    const at_s = this.now_s - ago_s;
    const where = `Slot ${slot}, ${ago_s.toFixed(1)} s ago: `;
    const lane = this.history.lanes.get(slot);
    const segment = lane?.segments.find((each) => each.from_s <= at_s && at_s <= each.to_s);
    if (!segment) return `${where}free. The next request that is admitted may take it.`;
    const near = lane.marks.filter((mark) => mark.sequence === segment.sequence && Math.abs(mark.at_s - at_s) < 0.3);
    return [`${where}sequence ${segment.sequence}. ${KINDS[segment.kind](segment)}`, ...near.map(saidOf)].join(" ");
  }
}

/** [lanes, seconds] that a key moves the cursor. */
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, 0.25], ArrowRight: [0, -0.25] };

const KINDS = {
  prefill: ({ tokens }) => `Prefill: its prompt is read, here ${tokens} tokens, many in one step.`,
  decode: ({ tokens }) => `Decode: it writes one token in each step, together with the other lanes; here ${tokens}.`,
  held: () => "It holds its slot and its blocks, but computed nothing: it waits for memory, or for its turn.",
};

function saidOf({ kind, tokens }) {
  const said = {
    admitted: "Here it was admitted to the batch.",
    hit: `Its first ${tokens} tokens were in the cache and are not computed again.`,
    preempted: "Here it was preempted: memory ran out, and it gave back its blocks. It is computed again later.",
    ended: "Here it ended; its blocks stay cached until they are needed.",
  };
  return said[kind];
}

/** As many lanes as the highest slot in sight needs, in fours, so that the picture seldom jumps. */
function numLanes({ lanes, frame }) {
  const needed = Math.max(0, ...lanes.keys()) + 1;
  return Math.min(Math.max(8, 4 * Math.ceil(needed / 4)), 256, Math.max(needed, frame?.num_slots ?? 8));
}
