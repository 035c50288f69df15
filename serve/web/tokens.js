// Text made of tokens: each is coloured by its probability and shows its rivals when pointed at.

const LEVELS = [0.9, 0.6, 0.3, 0.1]; // above the first: sure; below the last: a surprise
const card = document.getElementById("token-card");

/** Shows one answer; takes the text and the log-probabilities of its tokens as they come. */
export class TokenText {
  constructor(element) {
    this.element = element;
    this.content = ""; // all text so far
    this.shown = 0; // characters of it on the page
    this.queue = []; // tokens whose text has not come
    this.decoder = new TextDecoder();
    this.group = []; // tokens that together make a character
  }

  add(text, tokens) {
    this.content += text;
    if (!tokens && !this.queue.length) {
      this.#append(text);
      return;
    }
    for (const token of tokens ?? []) this.#enqueue(token);
    this.#flush();
  }

  /** Show what is left: text without tokens stays, tokens without text (an end mark) go. */
  finish() {
    this.#flush();
    this.queue = [];
    if (this.shown < this.content.length) this.#append(this.content.slice(this.shown));
  }

  #enqueue(token) {
    this.group.push(token);
    const bytes = token.bytes ? Uint8Array.from(token.bytes) : new TextEncoder().encode(token.token);
    const text = this.decoder.decode(bytes, { stream: true });
    if (text) {
      this.queue.push({ text, tokens: this.group });
      this.group = [];
    }
  }

  #flush() {
    while (this.queue.length && this.shown < this.content.length) {
      const rest = this.content.slice(this.shown);
      const { text, tokens } = this.queue[0];
      const fit = [text, text.trimStart()].find((form) => form && rest.startsWith(form));
      if (fit === undefined && text.startsWith(rest)) return; // the rest of this token will come
      this.queue.shift();
      if (fit !== undefined) this.#append(fit, tokens);
    }
  }

  #append(text, tokens) {
    this.shown += text.length;
    if (!tokens) {
      this.element.append(text);
      return;
    }
    const span = document.createElement("span");
    span.className = `tok l${level(tokens)}`;
    span.textContent = text;
    span.tokens = tokens;
    this.element.append(span);
  }
}

function level(tokens) {
  const p = Math.min(...tokens.map((token) => Math.exp(token.logprob)));
  const found = LEVELS.findIndex((bound) => p >= bound);
  return found < 0 ? LEVELS.length : found;
}

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value >= 10 ? `${value.toFixed(0)} %` : `${value.toPrecision(2)} %`;
}

function row(token, chosen) {
  const line = document.createElement("div");
  line.className = chosen ? "rival chosen" : "rival";
  const name = document.createElement("code");
  name.textContent = token.token.replaceAll("\n", "⏎").replaceAll(" ", "·") || "∅";
  const bar = document.createElement("span");
  bar.className = "bar";
  bar.style.setProperty("--share", Math.exp(token.logprob));
  const value = document.createElement("span");
  value.textContent = percent(token.logprob);
  line.append(name, bar, value);
  return line;
}

function show(span) {
  card.replaceChildren();
  for (const token of span.tokens) {
    const rivals = token.top_logprobs ?? [];
    if (!rivals.some((rival) => rival.token === token.token)) card.append(row(token, true));
    for (const rival of rivals) card.append(row(rival, rival.token === token.token));
  }
  document.querySelector(".tok.active")?.classList.remove("active");
  span.classList.add("active");
  card.hidden = false;
  place(span);
}

function place(span) {
  const at = span.getClientRects()[0];
  const room = document.documentElement;
  const left = Math.max(8, Math.min(at.left, room.clientWidth - card.offsetWidth - 8));
  const below = at.bottom + 6;
  const fits = below + card.offsetHeight < room.clientHeight - 8;
  card.style.left = `${left}px`;
  card.style.top = `${Math.max(8, fits ? below : at.top - card.offsetHeight - 6)}px`;
}

function hide() {
  card.hidden = true;
  document.querySelector(".tok.active")?.classList.remove("active");
}

function showAt(event) {
  const span = event.target.closest?.(".tok");
  if (span) show(span);
  else hide();
}

/** Shows the card for pointed, tapped or keyed-to tokens below `root`. */
export function watchTokens(root) {
  // A finger leaves with its release: what it tapped stays until the next tap.
  const byPointer = (act) => (event) => event.pointerType !== "touch" && act(event);
  root.addEventListener("pointerover", byPointer(showAt));
  root.addEventListener("pointerleave", byPointer(hide));
  root.addEventListener("click", showAt);
  document.addEventListener("pointerdown", (event) => root.contains(event.target) || hide());
  root.addEventListener("scroll", hide, { passive: true });
  root.addEventListener("focusout", hide);
  root.addEventListener("keydown", (event) => {
    const text = event.target.closest?.(".text");
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!text || event.target !== text || step === undefined) return;
    const spans = [...text.querySelectorAll(".tok")];
    const now = spans.findIndex((span) => span.classList.contains("active"));
    const next = spans[now < 0 ? (step > 0 ? 0 : spans.length - 1) : now + step];
    if (!next) return;
    event.preventDefault();
    next.scrollIntoView({ block: "nearest" });
    show(next);
  });
}
