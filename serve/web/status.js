// Live status: asks /status, keeps two minutes of samples, draws the cards.

import { getJson } from "/web/api.js";

const PERIOD = 1000; // ms between two questions
const KEPT = 120; // samples
const PARTS = ["schedule", "prepare", "run", "sample", "update"];

const byId = (id) => document.getElementById(id);
const samples = [];
let timer = 0;

/** Ask again and again while the page is seen; `onStatus` gets each answer or error. */
export function startStatus(onStatus) {
  const tick = async () => {
    clearTimeout(timer);
    if (document.hidden) return;
    try {
      const status = await getJson("/status");
      draw(status);
      await onStatus(status, null);
    } catch (error) {
      await onStatus(null, error);
    }
    timer = setTimeout(tick, PERIOD);
  };
  document.addEventListener("visibilitychange", tick);
  tick();
  return tick;
}

function draw(status) {
  drawStart(status);
  drawFacts(status);
  if (!status.engine) return;
  const engine = status.engine;
  const sample = { at: performance.now(), engine, parts: status.step_seconds };
  const last = samples.at(-1);
  sample.rates = last ? ratesBetween(last, sample) : { out: 0, in: 0 };
  samples.push(sample);
  if (samples.length > KEPT) samples.shift();
  byId("running").textContent = engine.num_running;
  byId("waiting").textContent = engine.num_waiting;
  byId("finished").textContent = count(Object.values(engine.finished).reduce((a, b) => a + b, 0));
  byId("rate-out").textContent = rate(sample.rates.out);
  byId("rate-in").textContent = rate(sample.rates.in);
  drawSpark();
  drawCache(engine.kv_cache);
  drawStep();
}

function ratesBetween(before, after) {
  const seconds = (after.at - before.at) / 1000;
  const per = (name) => Math.max(0, (after.engine[name] - before.engine[name]) / seconds);
  return { out: per("num_generated_tokens"), in: per("num_prompt_tokens") };
}

/** How far compiling behind a serving engine is, in the shape of a start. */
function compilingOf(status) {
  const state = status.engine?.compiling;
  if (!state || state.phase === "done") return null;
  const { phase, tiles, total_tiles, seconds, detail } = state;
  const text = phase === "compiling" ? "tiles run compiled" : detail;
  return { stage: phase, done: tiles, total: total_tiles, seconds, detail: text };
}

function drawStart(status) {
  const card = byId("start-card");
  if (status.status === "ready") status = compilingOf(status);
  card.hidden = status === null;
  if (card.hidden) return;
  byId("start-stage").textContent = status.stage ?? status.status;
  const bar = byId("start-bar");
  if (status.total) {
    bar.max = status.total;
    bar.value = status.done;
  } else {
    bar.removeAttribute("value");
  }
  const steps = status.total ? `${status.done} of ${status.total}` : "";
  const parts = [steps, status.detail, `${Math.round(status.seconds)} s`];
  byId("start-detail").textContent = parts.filter(Boolean).join(" · ");
}

function drawSpark() {
  const values = samples.map((sample) => sample.rates.out);
  const top = Math.max(1, ...values) * 1.1;
  const x = (index) => 240 - (values.length - 1 - index) * (240 / (KEPT - 1));
  const y = (value) => 55 - (value / top) * 53;
  const line = values.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join("L");
  const [area, path] = byId("spark").querySelectorAll("path");
  path.setAttribute("d", `M${line}`);
  area.setAttribute("d", `M${x(0).toFixed(1)},56L${line}L240,56Z`);
}

function drawCache(cache) {
  const share = Math.round(cache.usage * 1000) / 10;
  const meter = byId("kv-meter");
  meter.firstElementChild.style.width = `${share}%`;
  meter.setAttribute("aria-valuenow", share);
  const used = Math.round(cache.usage * cache.num_blocks);
  byId("kv-used").textContent = `${share} % of ${count(cache.num_blocks)} blocks, ${count(used)} in use`;
  const hits = cache.prefix_queries ? (100 * cache.prefix_hits) / cache.prefix_queries : 0;
  byId("kv-hits").textContent = `${hits.toFixed(0)} % of prompts from cache`;
}

/** The split of a step's time over the samples kept. */
function drawStep() {
  const [first, last] = [samples[0], samples.at(-1)];
  const names = PARTS.filter((name) => last.parts[name] > 0);
  const isNew = last.engine.num_steps > first.engine.num_steps;
  const spent = names.map((name) => last.parts[name] - (isNew ? first.parts[name] : 0));
  const steps = last.engine.num_steps - (isNew ? first.engine.num_steps : 0);
  const total = spent.reduce((a, b) => a + b, 0);
  byId("step-ms").textContent = steps ? `${ms((1000 * total) / steps)} ms` : "";
  const bars = names.map((name, index) => {
    const bar = document.createElement("span");
    bar.className = name;
    bar.style.flexGrow = total ? spent[index] / total : 0;
    return bar;
  });
  byId("step-split").replaceChildren(...bars);
  const items = names.map((name, index) => {
    const item = document.createElement("li");
    item.className = name;
    item.textContent = steps ? `${name} ${ms((1000 * spent[index]) / steps)}` : name;
    return item;
  });
  byId("step-legend").replaceChildren(...items);
}

function drawFacts(status) {
  const engine = status.engine;
  const facts = {
    model: status.model ?? "–",
    context: status.max_model_len ? `${count(status.max_model_len)} tokens` : "–",
    started: `in ${Math.round(status.seconds)} s`,
    steps: engine ? count(engine.num_steps) : "–",
    preemptions: engine ? count(engine.num_preemptions) : "–",
    "failed steps": engine ? count(engine.num_failed_steps) : "–",
    bundle: status.key ? status.key.slice(0, 12) : "–",
    girih: status.version,
  };
  if (status.status !== "ready") delete facts.started;
  const pairs = Object.entries(facts).flatMap(([name, value]) => {
    const dt = document.createElement("dt");
    const dd = document.createElement("dd");
    dt.textContent = name;
    dd.textContent = value;
    return [dt, dd];
  });
  byId("facts").replaceChildren(...pairs);
}

const count = (value) => value.toLocaleString("en");
const rate = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(1));
const ms = (value) => (value >= 10 ? value.toFixed(0) : value.toPrecision(2));
