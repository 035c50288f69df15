// The form of model and sampling; kept in this browser.

import { getJson, keepKey, readKey } from "/web/api.js";
import { modeOf } from "/web/modes.js";

const STORE = "girih.settings";
const NUMBERS = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "repetition_penalty",
  "presence_penalty", "frequency_penalty", "seed",
];
const ALTERNATIVES = 5;
const form = document.getElementById("settings-form");
const modelField = document.getElementById("model");
const keyField = document.getElementById("key");
let serverTokens = null; // the server's own longest answer, if it sets one

function save() {
  const values = Object.fromEntries(new FormData(form));
  values.logprobs = form.elements.logprobs.checked;
  localStorage.setItem(STORE, JSON.stringify(values));
}

function restore() {
  let values = {};
  try {
    values = JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    // another version wrote it
  }
  for (const [name, value] of Object.entries(values)) {
    const field = form.elements[name];
    if (!field || name === "model") continue;
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
  }
}

/** Wire the form; `onKey` is called when the key changed. */
export function startSettings(onKey) {
  restore();
  keyField.value = readKey();
  form.addEventListener("input", save);
  form.addEventListener("reset", () => setTimeout(save));
  form.addEventListener("submit", (event) => event.preventDefault());
  keyField.addEventListener("change", () => {
    keepKey(keyField.value.trim());
    onKey();
  });
}

/** Ask for a key when the server wants one. */
export function askForKey(is) {
  const field = document.getElementById("key-field");
  if (is && field.hidden) keyField.placeholder = "this server needs one";
  if (is) field.hidden = false;
}

/** Fill the list of models, and show each default in grey; returns the model's card. */
export async function loadModels() {
  const { data } = await getJson("/v1/models");
  const chosen = modelField.value;
  modelField.replaceChildren(...data.map((model) => new Option(model.id, model.id)));
  if (data.some((model) => model.id === chosen)) modelField.value = chosen;
  const card = await getJson(`/v1/models/${encodeURIComponent(modelField.value)}`);
  for (const [name, value] of Object.entries(card.default_sampling ?? {})) {
    const field = form.elements[name];
    if (field && value !== null && field.placeholder !== undefined) field.placeholder = value;
  }
  serverTokens = card.default_sampling?.max_tokens;
  form.elements.max_tokens.placeholder = serverTokens ?? modeOf(card).maxTokens ?? "context";
  return card;
}

/** Return the body of a request that continues these messages. */
export function requestBody(messages, mode) {
  const system = form.elements.system.value.trim();
  const top = form.elements.logprobs.checked ? ALTERNATIVES : 0;
  const body = { model: modelField.value || undefined, ...mode.body(messages, { system, top }), stream: true };
  if (mode.maxTokens && !serverTokens) body.max_tokens = mode.maxTokens;
  for (const name of NUMBERS) {
    const text = form.elements[name].value.trim();
    if (text !== "") body[name] = Number(text);
  }
  const stop = form.elements.stop.value;
  if (stop) body.stop = [stop.replaceAll("\\n", "\n").replaceAll("\\t", "\t")];
  body.stream_options = { include_usage: true };
  return body;
}

/** Return a request as a command line. */
export function asCurl({ path, body }) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", `'\\''`);
  const key = readKey() ? " \\\n  -H 'authorization: Bearer KEY'" : "";
  return `curl -N ${location.origin}${path} \\\n  -H 'content-type: application/json'${key} \\\n  -d '${quoted}'`;
}
