// Conversations: several in the memory of the tab, one shown.

import { Answer, element, stream } from "./answer.js";

const $ = (id) => document.getElementById(id);
/** Pixels from its end within which the log keeps scrolling with the text. */
const NEAR_END = 60;

/** The parameters of the form; what is left empty is undefined, so the server's default holds. */
export function parameters() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  return {
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    system: $("system").value.trim(),
  };
}

class Session {
  constructor() {
    this.messages = [];
    this.answer = null;
    this.abort = null;
    this.isRunning = false;
    this.log = element("div", "log");
    this.option = element("option", "", "New conversation");
  }
}

export class Chat {
  /** serving: its `model` is the one to ask, null before one is known. */
  constructor(serving) {
    this.serving = serving;
    this.sessions = [];
    $("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("regenerate").addEventListener("click", () => this.regenerate());
    $("new-session").addEventListener("click", () => this.open());
    $("delete-session").addEventListener("click", () => this.remove());
    $("session").addEventListener("change", (event) => this.show(this.sessions[event.target.selectedIndex]));
    this.open();
  }

  open() {
    const session = new Session();
    this.sessions.push(session);
    $("session").append(session.option);
    this.show(session);
    return session;
  }

  remove() {
    const at = this.sessions.indexOf(this.shown);
    this.shown.abort?.abort();
    this.shown.option.remove();
    this.sessions.splice(at, 1);
    if (this.sessions.length) this.show(this.sessions[Math.max(0, at - 1)]);
    else this.open();
  }

  show(session) {
    this.shown = session;
    session.option.selected = true;
    $("logs").replaceChildren(session.log);
    $("logs").scrollTop = $("logs").scrollHeight;
    this.updateButtons();
  }

  send() {
    const session = this.shown;
    const content = this.serving.model?.hasChat ? $("prompt").value.trim() : $("prompt").value;
    if (!content.trim() || session.isRunning || !this.serving.model) return;
    if (!session.messages.length) session.option.textContent = content.trim().slice(0, 40);
    session.messages.push({ role: "user", content });
    const turn = element("article", this.serving.model.hasChat ? "turn user" : "turn user plain");
    turn.append(element("h4", "", this.serving.model.hasChat ? "You" : "Prompt"), element("div", "text", content));
    session.log.append(turn);
    $("prompt").value = "";
    this.#answer(session);
  }

  stop() {
    this.shown.abort?.abort();
  }

  regenerate() {
    const session = this.shown;
    if (session.isRunning || !session.answer) return;
    session.answer.element.remove();
    if (session.messages.at(-1).role === "assistant") session.messages.pop();
    this.#answer(session);
  }

  /** Send again what was refused for want of a key. */
  retryRefused() {
    if (this.shown.answer?.error?.status === 401) this.regenerate();
  }

  async #answer(session) {
    const model = this.serving.model;
    const answer = new Answer(model.id, !model.hasChat);
    session.answer = answer;
    session.abort = new AbortController();
    session.isRunning = true;
    session.log.append(answer.element);
    this.updateButtons();
    const { messages } = session;
    const wanted = model.hasChat ? { messages: [...messages] } : { prompts: [messages.at(-1).content] };
    this.follow(true);
    const ask = { ...wanted, parameters: parameters() };
    await stream(model, ask, [answer], session.abort.signal, () => this.follow(false));
    this.follow(false);
    if (answer.text) session.messages.push({ role: "assistant", content: answer.text });
    session.isRunning = false;
    this.updateButtons();
  }

  /** Keep the end of the log in sight, unless the reader has scrolled up. */
  follow(always) {
    const log = $("logs");
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END) log.scrollTop = log.scrollHeight;
  }

  updateButtons() {
    const { isRunning, answer } = this.shown;
    $("send").disabled = isRunning || !this.serving.model;
    $("stop").disabled = !isRunning;
    $("regenerate").disabled = isRunning || !answer;
  }
}
