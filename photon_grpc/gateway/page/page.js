// The page: which model is served, the key, dark and light, and the keys of the keyboard.

import { call, keys, useKey } from "./calls.js";
import { Chat } from "./chat.js";
import { Many } from "./many.js";
import { Picture } from "./picture.js";

const $ = (id) => document.getElementById(id);
const RETRY_MS = 2000;
const EXAMPLE = "def fibonacci(n):\n";

const serving = { model: null, models: [] };
const chat = new Chat(serving);
const many = new Many(serving);
const picture = new Picture();

// -- the model -----------------------------------------------------------------------------------------------------

/** Ask until the server answers; a key that is wanted ends the asking until there is one. */
async function findModels() {
  try {
    const { data } = await (await call("/v1/models")).json();
    serving.models = data.map((model) => ({ ...model, hasChat: model.features?.includes("CHAT") ?? true }));
    $("model").replaceChildren(...serving.models.map(({ id }) => new Option(id, id)));
    $("model-choice").hidden = serving.models.length < 2;
    choose(serving.models.find((model) => model.default) ?? serving.models[0]);
  } catch (error) {
    $("serving").textContent = error.inFull ?? `The list of models cannot be read: ${error.message}`;
    if (error.status === 0 || error.status >= 500) setTimeout(findModels, RETRY_MS);
  }
}

function choose(model) {
  serving.model = model ?? null;
  if (!model) return void ($("serving").textContent = "The server has no model.");
  $("model").value = model.id;
  const length = model.max_model_len ? `, up to ${model.max_model_len} tokens` : "";
  const form = model.hasChat ? "" : "; it has no chat template, so it continues texts";
  $("serving").textContent = `${model.id}${length}${form}`;
  $("chat-title").textContent = model.hasChat ? "Chat" : "Completion";
  $("prompt-label").textContent = model.hasChat ? "Your message" : "A text to continue";
  $("system-choice").hidden = !model.hasChat;
  if (!model.hasChat && !$("prompt").value) $("prompt").value = EXAMPLE;
  chat.updateButtons();
}

$("model").addEventListener("change", (event) => choose(serving.models[event.target.selectedIndex]));

// -- the key -------------------------------------------------------------------------------------------------------

function showKeyForm(isShown) {
  $("key-form").hidden = !isShown;
  $("key-button").setAttribute("aria-expanded", isShown);
  if (isShown) $("key").focus();
}

keys.addEventListener("needed", ({ detail }) => {
  $("key-reason").textContent = `The server wants an API key (${detail.inFull}). It stays in the memory of this tab.`;
  if ($("key-form").hidden) showKeyForm(true);
});

$("key-button").addEventListener("click", () => showKeyForm($("key-form").hidden));

$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  useKey($("key").value);
  showKeyForm(false);
  $("prompt").focus();
  await findModels();
  chat.retryRefused();
});

// -- light, dark and the keyboard ----------------------------------------------------------------------------------

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : prefersDark.matches;
}

function nameTheme() {
  $("theme-button").textContent = isDark() ? "Light" : "Dark";
}

$("theme-button").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
  picture.recolour();
});
prefersDark.addEventListener("change", nameTheme);

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  chat.stop();
  many.stop();
});

nameTheme();
findModels();
