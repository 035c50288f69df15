// Texts that become vectors, labels or scores: what an embedder or a classifier is good for.

import { postJson } from "/web/api.js";
import { copyText } from "/web/clipboard.js";

const STORE = "girih.texts";
const EXAMPLES = {
  embed: [
    "How do I reset my password?",
    "I forgot my login and cannot get in",
    "The invoice shows the wrong address",
    "Tiles cover a wall without gaps",
  ],
  label: ["I love this, thank you!", "It broke after two days", "It arrived on Monday"],
  score: [
    "Which shapes cover a plane without gaps?",
    "Squares, triangles and hexagons tile the plane.",
    "The train leaves at ten past nine.",
  ],
};
const MOST_LABELS = 5;
const SHOWN_NUMBERS = 4;

const form = document.getElementById("texts-form");
const input = document.getElementById("texts-input");
const list = document.getElementById("texts-result");
const figures = document.getElementById("texts-figures");
const alertBox = document.getElementById("texts-error");
const template = document.getElementById("hit");

let card = null; // of the model
let kind = null; // "embed", "label" or "score"
let texts = []; // what was sent
let values = []; // per text: its vector, or its probabilities
let chosen = 0; // the text that the others are held against
let onError = () => {};

/** Wire the form; `report` is called with an error of a request. */
export function startTexts(report) {
  onError = report;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    compute();
  });
  input.addEventListener("input", () => {
    chosen = 0;
    sessionStorage.setItem(STORE, input.value);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  list.addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (!item) return;
    if (event.target.closest("[data-do=copy]")) copyText(JSON.stringify(values[item.index]));
    else if (event.target.closest(".pick")) pick(item.index);
  });
}

/** Take the model's card: what the page offers depends on it. */
export function describeTexts(model) {
  card = model;
  const { labels, width } = card.pooling;
  kind = card.task === "embed" ? "embed" : labels.length > 1 ? "label" : "score";
  const [title, about] = {
    embed: [
      "Compare texts",
      `This model turns a text into ${width} numbers: texts alike in meaning are close. Write one per line, ` +
        "and choose one to see how close the others are.",
    ],
    label: ["Classify texts", `This model says which of ${labels.length} labels fits a text. Write one text per line.`],
    score: [
      "Score texts",
      "This model says how well a text answers another. Write one per line, and choose the one that asks.",
    ],
  }[kind];
  document.getElementById("texts-title").textContent = title;
  document.getElementById("texts-about").textContent = about;
  document.getElementById("texts-send").textContent = title.split(" ")[0];
  input.value = sessionStorage.getItem(STORE) ?? EXAMPLES[kind].join("\n");
  clearTexts();
}

/** Forget the answers. */
export function clearTexts() {
  [texts, values, chosen] = [[], [], 0];
  list.replaceChildren();
  figures.textContent = "";
  alertBox.hidden = true;
}

/** The request for the lines as they are: its path and body. */
export function textsRequest() {
  const lines = readLines();
  const model = card?.id;
  if (kind === "embed") return { path: "/v1/embeddings", body: { model, input: lines } };
  if (kind === "label") return { path: "/v1/classify", body: { model, input: lines } };
  const others = lines.filter((_, index) => index !== chosen);
  return { path: "/v1/score", body: { model, text_1: lines[chosen], text_2: others } };
}

function readLines() {
  return input.value.split("\n").map((line) => line.trim()).filter(Boolean);
}

async function compute() {
  const { path, body } = textsRequest();
  const lines = readLines();
  const began = performance.now();
  form.classList.add("busy");
  alertBox.hidden = true;
  try {
    const answer = await postJson(path, body);
    texts = lines;
    values = valuesOf(answer.data);
    draw();
    const seconds = (performance.now() - began) / 1000;
    figures.textContent = [
      `${texts.length} text${texts.length === 1 ? "" : "s"}`,
      `${answer.usage.prompt_tokens} tokens`,
      `${seconds.toFixed(2)} s`,
    ].join(" · ");
  } catch (error) {
    alertBox.textContent = error.message;
    alertBox.hidden = false;
    onError(error);
  } finally {
    form.classList.remove("busy");
  }
}

/** What an answer says of each text. */
function valuesOf(data) {
  if (kind === "embed") return data.map((entry) => entry.embedding);
  if (kind === "label") return data.map((entry) => entry.probs);
  const scores = data.map((entry) => entry.score);
  scores.splice(chosen, 0, 1); // the one that asks
  return scores;
}

function pick(index) {
  if (kind === "label" || index === chosen) return;
  chosen = index;
  if (kind === "embed") draw();
  else compute();
}

function draw() {
  const places = texts.map((_, index) => index);
  const rank = (index) => (index === chosen ? Infinity : (closeness(index) ?? 0));
  if (kind !== "label") places.sort((a, b) => rank(b) - rank(a));
  list.replaceChildren(...places.map(itemOf));
}

/** How close a text is to the chosen one; null where that is no number. */
function closeness(index) {
  if (kind === "score") return values[index];
  return isVector(values[index]) ? cosine(values[chosen], values[index]) : null;
}

const isVector = (value) => typeof value?.[0] === "number"; // else one vector per token

function cosine(a, b) {
  let [dot, aa, bb] = [0, 0, 0];
  for (let i = 0; i < a.length; i++) {
    dot += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return dot / (Math.sqrt(aa * bb) || 1);
}

function itemOf(index) {
  const item = template.content.firstElementChild.cloneNode(true);
  item.index = index;
  const button = item.querySelector(".pick");
  button.querySelector(".hit-text").textContent = texts[index];
  button.disabled = kind === "label";
  const vector = item.querySelector(".vector");
  vector.hidden = kind !== "embed";
  if (kind === "label") {
    button.after(...labelRows(values[index]));
    return item;
  }
  const isChosen = index === chosen;
  button.setAttribute("aria-pressed", String(isChosen));
  if (!isChosen && closeness(index) !== null) button.append(...bar(closeness(index)));
  vector.querySelector("code").textContent = kind === "embed" ? start(values[index]) : "";
  return item;
}

function start(value) {
  if (!isVector(value)) return `${value.length} vectors of ${value[0].length} numbers`;
  const numbers = value.slice(0, SHOWN_NUMBERS).map((number) => number.toFixed(3));
  return value.length > SHOWN_NUMBERS ? `${numbers.join(", ")}, … (${value.length})` : numbers.join(", ");
}

function labelRows(probs) {
  const order = probs.map((_, index) => index).sort((a, b) => probs[b] - probs[a]);
  return order.slice(0, MOST_LABELS).map((index, place) => {
    const row = document.createElement("div");
    row.className = place ? "rival" : "rival chosen";
    const name = document.createElement("code");
    name.textContent = card.pooling.labels[index];
    row.append(name, ...bar(probs[index]));
    return row;
  });
}

function bar(value) {
  const line = document.createElement("span");
  line.className = "bar";
  line.style.setProperty("--share", Math.max(0, Math.min(1, value)));
  const number = document.createElement("span");
  number.className = "value";
  number.textContent = value.toFixed(2);
  return [line, number];
}
