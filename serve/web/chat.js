// The conversation: sending, streaming, stopping, changing what was said.

import { streamChat } from "/web/api.js";
import { MessageView } from "/web/message.js";
import { requestBody } from "/web/settings.js";
import { watchTokens } from "/web/tokens.js";

const STORE = "girih.chat";
const NEAR_END = 80; // pixels: whoever reads further up is not pulled down

const log = document.getElementById("log");
const input = document.getElementById("input");
const sendButton = document.getElementById("send");
const stopButton = document.getElementById("stop");

let views = [];
let running = null; // AbortController of the answer being written
let onError = () => {};

/** The messages so far. */
export function messages() {
  return views.map((view) => view.message);
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
  for (const message of restore()) add(message);
  showWelcome();
}

/** Forget the conversation. */
export function clear() {
  stop();
  views = [];
  log.replaceChildren();
  save();
  showWelcome();
  input.focus();
}

function restore() {
  try {
    return JSON.parse(sessionStorage.getItem(STORE)) ?? [];
  } catch {
    return [];
  }
}

function save() {
  const kept = views.filter((view) => !view.failed).map((view) => view.message);
  const plain = kept.map(({ role, content, thought, figures }) => ({ role, content, thought, figures }));
  sessionStorage.setItem(STORE, JSON.stringify(plain));
}

function showWelcome() {
  log.querySelector(".welcome")?.remove();
  if (views.length) return;
  const welcome = document.getElementById("welcome").content.firstElementChild.cloneNode(true);
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
  log.querySelector(".welcome")?.remove();
  const view = new MessageView(message, act);
  views.push(view);
  log.append(view.element);
  return view;
}

function removeFrom(index) {
  for (const view of views.splice(Math.max(0, index))) view.element.remove();
}

function act(what, view) {
  if (running) return;
  const index = views.indexOf(view);
  if (what === "copy") navigator.clipboard?.writeText(view.message.content);
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
  const text = input.value.trim();
  if (!text || running) return;
  if (views.at(-1)?.failed) removeFrom(views.length - 2); // and the question it left open
  input.value = "";
  grow();
  add({ role: "user", content: text });
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
  const body = requestBody(messages());
  const view = add({ role: "assistant", content: "" });
  const controller = new AbortController();
  const meter = new Meter();
  setRunning(controller);
  view.busy(true);
  follow(true);
  try {
    for await (const event of streamChat(body, controller.signal)) {
      meter.note(event);
      for (const choice of event.choices) {
        const delta = choice.delta ?? {};
        const thought = delta.reasoning_content ?? delta.reasoning;
        view.add(delta.content ?? "", choice.logprobs?.content, thought);
      }
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

  note(event) {
    for (const choice of event.choices) {
      const delta = choice.delta ?? {};
      if (delta.content || delta.reasoning_content || delta.reasoning) {
        this.first ??= performance.now();
        this.last = performance.now();
        this.pieces += 1;
      }
      this.reason = choice.finish_reason ?? this.reason;
    }
    this.tokens = event.usage?.completion_tokens ?? this.tokens;
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
