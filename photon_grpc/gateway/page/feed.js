// The feed of the live picture: open while the tab is seen, opened again after an end.

import { call, CallError, events, keys, parsed } from "./calls.js";

const FIRST_PAUSE_S = 0.5;
const LONGEST_PAUSE_S = 10;
/** Without a frame for so long, the engine is starting again, or the way to it is broken. */
const SILENCE_S = 3;

/** Answers that do not change until there is another key. */
const FINAL = {
  401: "The picture needs an API key.",
  403: "The picture needs a key with the scope admin.",
  404: "This server has no live picture.",
};

export class Feed {
  /** onFrame(frame); onState(words, isLive). */
  constructor(onFrame, onState) {
    this.onFrame = onFrame;
    this.onState = onState;
    this.abort = null;
    this.lastFrame_ms = 0;
    keys.addEventListener("changed", () => this.restart());
    document.addEventListener("visibilitychange", () => this.restart());
    setInterval(() => this.#checkSilence(), 1000);
    this.restart();
  }

  /** Close the feed, and open it again if the tab is seen. */
  restart() {
    this.abort?.abort();
    this.abort = null;
    if (document.hidden) return;
    this.abort = new AbortController();
    this.#watch(this.abort.signal);
  }

  async #watch(signal) {
    let pause_s = FIRST_PAUSE_S;
    while (!signal.aborted) {
      const opened_ms = performance.now();
      const reason = await this.#readOnce(signal);
      if (signal.aborted) return;
      if (this.lastFrame_ms > opened_ms) pause_s = FIRST_PAUSE_S;
      this.lastFrame_ms = 0;
      if (FINAL[reason.status]) return this.onState(`${FINAL[reason.status]} (${reason.inFull})`, false);
      this.onState(`${reason.inFull} Trying again …`, false);
      await new Promise((wake) => setTimeout(wake, pause_s * 1000 * (0.75 + Math.random() / 2)));
      pause_s = Math.min(LONGEST_PAUSE_S, pause_s * 2);
    }
  }

  /** Return why it ended. */
  async #readOnce(signal) {
    try {
      for await (const data of events(await call("/engine/events", { signal }))) {
        const frame = parsed(data);
        if (signal.aborted) break;
        this.lastFrame_ms = performance.now();
        this.onState(`${frame.device}, ${frame.num_slots} slots`, true);
        this.onFrame(frame);
      }
      return new CallError("The engine is restarting, or the server is going away.");
    } catch (error) {
      return error instanceof CallError ? error : new CallError(`The picture cannot be read: ${error.message}.`);
    }
  }

  #checkSilence() {
    if (!this.lastFrame_ms) return;
    const silence_s = (performance.now() - this.lastFrame_ms) / 1000;
    if (silence_s > SILENCE_S) this.onState(`Engine restarting? No news for ${silence_s.toFixed(0)} s.`, false);
  }
}
