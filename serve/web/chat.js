// The conversation: sending, streaming, stopping, changing what was said.

import { streamJson } from "/web/api.js";
import { copyText } from "/web/clipboard.js";
import { MessageView } from "/web/message.js";
import { CHAT, COMPLETION } from "/web/modes.js";
import { requestBody } from "/web/settings.js";
import { watchTokens } from "/web/tokens.js";

const STORE = "girih.chat";
const PLACEHOLDERS = {
  chat: ["Ask something", "Ask something"],
  completion: ["Begin a text", "Add text, or just send"],
};
const NEAR_END = 80; // pixels: whoever reads further up is not pulled down

const log = document.getElementById("log");
const input = document.getElementById("input");
const sendButton = document.getElementById("send");
const stopButton = document.getElementById("stop");

let mode = CHAT;
let views = [];
let running = null; // AbortController of the answer being written
let onError = () => {};

const contents = () => views.map((view) => view.message);

/** The request that the last answer came from, or that a message being written would make. */
export function request() {
  const said = contents();
  const text = draft();
  if (text) {
    if (views.at(-1)?.failed) said.splice(firstFailed());
    said.push({ role: "user", content: text });
  } else if (said.at(-1)?.role === "assistant") {
    said.pop();
  }
  if (!said.length) said.push({ role: "user", content: "Hello!" });
  return { path: mode.path, body: requestBody(said, mode) };
}

/** Have the model answer, or continue; what was said in another mode is not shown. */
export function setChatMode(wanted) {
  if (mode === wanted) return;
  mode = wanted;
  show(restore());
}

/** Wire the page; `report` is called with an error of a request. */
export function startChat(report) {
  onError = report;
  watchTokens(log);
  document.getElementById("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  input.addEventListener("input", grow);
  stopButton.addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  show(restore());
}

/** Forget the conversation. */
export function clear() {
  show([]);
  save();
  input.focus();
}

function show(messages) {
  stop();
  removeFrom(0);
  for (const message of messages) add(message);
  showWelcome();
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(STORE));
    return kept?.mode === mode.name ? kept.messages : [];
  } catch {
    return [];
  }
}

function save() {
  const kept = views.filter((view) => !view.failed).map((view) => view.message);
  const plain = kept.map(({ role, content, thought, figures }) => ({ role, content, thought, figures }));
  sessionStorage.setItem(STORE, JSON.stringify({ mode: mode.name, messages: plain }));
}

function showWelcome() {
  log.querySelector(".welcome")?.remove();
  input.placeholder = PLACEHOLDERS[mode.name][views.length ? 1 : 0];
  if (views.length) return;
  const welcome = document.getElementById(`welcome-${mode.name}`).content.firstElementChild.cloneNode(true);
  welcome.addEventListener("click", (event) => {
    if (event.target.tagName !== "BUTTON") return;
    input.value = event.target.textContent;
    send();
  });
  log.append(welcome);
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

function add(message) {
  const view = new MessageView(message, act);
  views.push(view);
  log.append(view.element);
  showWelcome();
  return view;
}

function removeFrom(index) {
  for (const view of views.splice(Math.max(0, index))) view.element.remove();
}

/** Where what failed begins; a question that was left open is part of it. */
function firstFailed() {
  return views.length - (mode === CHAT ? 2 : 1);
}

/** What is being written; pieces of a text keep their white space. */
function draft() {
  return mode === CHAT ? input.value.trim() : input.value;
}

function act(what, view) {
  if (running) return;
  const index = views.indexOf(view);
  if (what === "copy") copyText(mode === CHAT ? view.message.content : contents().map((m) => m.content).join(""));
  if (what === "edit") view.edit(save);
  if (what === "drop") {
    views.splice(index, 1);
    view.element.remove();
    save();
    showWelcome();
  }
  if (what === "retry") {
    removeFrom(index);
    answer();
  }
}

function send() {
  const text = draft();
  const mayBeEmpty = mode === COMPLETION && views.length > 0;
  if (running || !(text || mayBeEmpty)) return;
  if (views.at(-1)?.failed) removeFrom(firstFailed());
  input.value = "";
  grow();
  if (text) add({ role: "user", content: text });
  answer();
}

function stop() {
  running?.abort();
}

function follow(always = false) {
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END) {
    log.scrollTop = log.scrollHeight;
  }
}

function setRunning(controller) {
  running = controller;
  sendButton.hidden = Boolean(controller);
  stopButton.hidden = !controller;
}

async function answer() {
  const body = requestBody(contents(), mode);
  const view = add({ role: "assistant", content: "" });
  const controller = new AbortController();
  const meter = new Meter();
  setRunning(controller);
  view.busy(true);
  follow(true);
  try {
    for await (const event of streamJson(mode.path, body, controller.signal)) {
      for (const choice of event.choices) {
        const piece = mode.read(choice);
        meter.note(piece, choice.finish_reason);
        view.add(piece.text, piece.tokens, piece.thought);
      }
      meter.tokens = event.usage?.completion_tokens ?? meter.tokens;
      follow();
    }
    view.finish(meter.summary());
  } catch (error) {
    if (error.name === "AbortError") view.finish(meter.summary("stopped"));
    else fail(view, error);
  } finally {
    setRunning(null);
    save();
    follow();
  }
}

function fail(view, error) {
  view.finish("");
  view.fail(error.message);
  view.failed = !view.message.content;
  onError(error);
}

/** Counts one answer. */
class Meter {
  constructor() {
    this.started = performance.now();
    this.first = null;
    this.pieces = 0;
    this.tokens = null;
    this.reason = null;
  }

  note({ text, thought }, reason) {
    if (text || thought) {
      this.first ??= performance.now();
      this.last = performance.now();
      this.pieces += 1;
    }
    this.reason = reason ?? this.reason;
  }

  summary(reason = this.reason) {
    const facts = [];
    if (reason === "length") facts.push("cut off at the longest length");
    else if (reason === "stopped") facts.push("stopped");
    const count = this.tokens ?? this.pieces;
    if (count) facts.push(`${count} token${count === 1 ? "" : "s"}`);
    if (this.first !== null) {
      const seconds = (this.last - this.first) / 1000;
      if (count > 1 && seconds > 0) facts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
      facts.push(`first after ${((this.first - this.started) / 1000).toFixed(2)} s`);
    }
    return facts.join(" · ");
  }
}
