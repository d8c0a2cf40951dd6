// What the frames of the feed told about the last seconds, in the form that is drawn.

export const WINDOW_S = 10;
const MARKS = { admitted: 1, preempted: 2, ended: 4 };
/** After a longer silence, a frame speaks of the time that its steps took, and of no more than this. */
const LONGEST_FRAME_S = 0.5;

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    /** slot -> {segments: [{sequence, kind, from_s, to_s, tokens}], marks: [{kind, at_s, sequence, tokens}], last, isOver} */
    this.lanes = new Map();
    /** One for each frame: {at_s, step_ms, queued, tokens_per_s}. */
    this.samples = [];
    this.frame = null;
    this.totals = { frames: 0, admitted: 0, preempted: 0, ended: 0, hits: 0 };
  }

  add(frame) {
    if (this.frame && frame.time_s < this.frame.time_s) this.clear(); // the engine has started again
    const before_s = this.frame?.time_s ?? -Infinity;
    const isNext = frame.time_s - before_s <= LONGEST_FRAME_S;
    const from_s = isNext ? before_s : frame.time_s - Math.min(LONGEST_FRAME_S, reach_s(frame));
    const share = prefillShare(frame.steps);
    for (const [row, begin, end] of turns(frame.lanes)) {
      const at_s = (part) => from_s + part * (frame.time_s - from_s);
      this.#addLane(row, at_s(begin), end === 1 ? frame.time_s : at_s(end), share);
    }
    this.samples.push({
      at_s: frame.time_s,
      step_ms: meanStep_ms(frame.steps),
      queued: frame.queued,
      tokens_per_s: frame.output_tokens_per_s,
    });
    this.frame = frame;
    this.totals.frames += 1;
    this.#forget(frame.time_s - WINDOW_S);
  }

  #addLane([slot, sequence, prompt, cached, computed, output, prefilled, decoded, marks], from_s, to_s, share) {
    if (!this.lanes.has(slot)) this.lanes.set(slot, { segments: [], marks: [], last: null, isOver: false });
    const lane = this.lanes.get(slot);
    const mark = (kind, at_s, tokens = 0) => lane.marks.push({ kind, at_s, sequence, tokens });
    if (marks & MARKS.admitted || lane.last?.sequence !== sequence) {
      mark("admitted", from_s);
      this.totals.admitted += 1;
      if (cached) mark("hit", from_s, cached);
      this.totals.hits += cached > 0;
    }
    if (marks || lane.last?.sequence !== sequence) lane.isOver = (marks & (MARKS.preempted | MARKS.ended)) > 0;
    lane.last = { sequence, prompt, cached, computed, output, at_s: to_s };
    const turn_s = prefilled && decoded ? from_s + (to_s - from_s) * share : prefilled ? to_s : from_s;
    if (prefilled) extend(lane, { sequence, kind: "prefill", from_s, to_s: turn_s, tokens: prefilled });
    if (decoded) extend(lane, { sequence, kind: "decode", from_s: turn_s, to_s, tokens: decoded });
    if (!prefilled && !decoded && !marks && !lane.isOver) {
      extend(lane, { sequence, kind: "held", from_s, to_s, tokens: 0 });
    }
    for (const kind of ["preempted", "ended"]) {
      if (!(marks & MARKS[kind])) continue;
      mark(kind, to_s);
      this.totals[kind] += 1;
    }
  }

  #forget(before_s) {
    for (const [slot, lane] of this.lanes) {
      lane.segments = lane.segments.filter((segment) => segment.to_s > before_s);
      lane.marks = lane.marks.filter((mark) => mark.at_s > before_s);
      if (!lane.segments.length && !lane.marks.length) this.lanes.delete(slot);
    }
    this.samples = this.samples.filter((sample) => sample.at_s > before_s);
  }

  /** The lanes in use now: [slot, what is known of the sequence, kind of the newest segment]. */
  get inUse() {
    const now = [...this.lanes].filter(([, lane]) => lane.last.at_s === this.frame.time_s && !lane.isOver);
    const known = now.map(([slot, lane]) => [slot, lane.last, lane.segments.at(-1)?.kind ?? "held"]);
    return known.sort((a, b) => a[0] - b[0]);
  }
}

/** Give the sequences that had the same slot, one after the other, equal parts of the frame: [row, begin, end]. */
function turns(rows) {
  return rows.map((row, place) => {
    const before = rows.slice(0, place).filter(([slot]) => slot === row[0]).length;
    const count = rows.filter(([slot]) => slot === row[0]).length;
    return [row, before / count, (before + 1) / count];
  });
}

/** Add the segment, or lengthen the last one if it goes on in the same way. */
function extend(lane, segment) {
  const last = lane.segments.at(-1);
  const goesOn = last && last.kind === segment.kind && last.sequence === segment.sequence;
  if (!goesOn || segment.from_s - last.to_s > 0.05) return lane.segments.push(segment);
  last.to_s = segment.to_s;
  last.tokens += segment.tokens;
}

/** Seconds of computing that a frame tells of. */
function reach_s({ steps, num_steps }) {
  const told_s = steps.reduce((sum, [duration_s]) => sum + duration_s, 0);
  return Math.max(0.1, steps.length ? (told_s * num_steps) / steps.length : 0);
}

/** The part of the steps' time that went to steps with prefill, if anything was decoded: drawn first. */
function prefillShare(steps) {
  const sum = (chosen) => chosen.reduce((total, [duration_s]) => total + duration_s, 0);
  return Math.min(0.9, Math.max(0.1, sum(steps.filter((step) => step[1] > 0)) / (sum(steps) || 1)));
}

function meanStep_ms(steps) {
  return steps.length ? (1000 * steps.reduce((sum, [duration_s]) => sum + duration_s, 0)) / steps.length : null;
}
