// Calls of the server that this page came from. The key lives in this module and nowhere else.

let key = "";

/** Tells "needed" (detail: the error) when a call answers 401, and "changed" when there is another key. */
export const keys = new EventTarget();

export function useKey(value) {
  key = value.trim();
  keys.dispatchEvent(new Event("changed"));
}

/** What the server, or the way to it, answered instead of a result. Status 0: there was no answer. */
export class CallError extends Error {
  constructor(message, code = "", status = 0) {
    super(message);
    this.code = code;
    this.status = status;
  }

  get inFull() {
    const label = [this.status || "", this.code].filter(Boolean).join(" ");
    return label ? `${label}: ${this.message}` : this.message;
  }
}

/** GET, or with a body POST; return the response. Throw CallError, or AbortError if the signal came. */
export async function call(path, { body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store", credentials: "omit" };
  if (body) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw named(error);
  }
  if (response.ok) return response;
  const error = callError(await response.text().catch(() => ""), response.status);
  if (response.status === 401) keys.dispatchEvent(new CustomEvent("needed", { detail: error }));
  throw error;
}

/** Yield the data of each server-sent event; comment lines and other fields are skipped. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line || !data.length) continue;
        yield data.join("\n");
        data = [];
      }
    }
  } catch (error) {
    throw named(error);
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Parse an event; throw CallError if it carries one. */
export function parsed(data) {
  const value = JSON.parse(data);
  if (value.error) throw callError(data, 0);
  return value;
}

function callError(text, status) {
  try {
    const error = JSON.parse(text).error;
    return new CallError(error.message ?? text, String(error.code ?? error.type ?? ""), status);
  } catch {
    return new CallError(text || "the server gave no reason", "", status);
  }
}

function named(error) {
  if (error.name === "AbortError" || error instanceof CallError) return error;
  return new CallError(`The connection to the server was lost, or it is not running (${error.message}).`);
}
