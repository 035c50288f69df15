// One message on the page: its text, what can be done with it, and its figures.

import { TokenText } from "/web/tokens.js";

const NAMES = { user: "You", assistant: "Model", system: "System" };
const template = document.getElementById("message");

/** A message of the conversation and the element that shows it. */
export class MessageView {
  constructor(message, act) {
    this.message = message;
    this.element = template.content.firstElementChild.cloneNode(true);
    this.element.replaceChildren(...this.element.children); // white space would show between texts
    this.element.dataset.role = message.role;
    this.text = this.element.querySelector(".text");
    this.figures = this.element.querySelector(".figures");
    this.element.querySelector("h3").textContent = NAMES[message.role] ?? message.role;
    if (message.role !== "assistant") this.element.querySelector("[data-do=retry]").remove();
    this.element.querySelector(".actions").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) act(button.dataset.do, this);
    });
    this.show();
  }

  /** Draw what the message says. */
  show() {
    this.text.replaceChildren();
    this.tokens = new TokenText(this.text);
    if (this.message.pieces) {
      for (const piece of this.message.pieces) this.tokens.add(piece.text, piece.tokens);
      this.tokens.finish();
    } else {
      this.text.textContent = this.message.content;
    }
    this.#showThought();
    this.figures.textContent = this.message.figures ?? "";
    this.#makeKeyable();
  }

  /** Take part of an answer that is being written. */
  add(text, tokens, thought) {
    if (thought) {
      this.message.thought = (this.message.thought ?? "") + thought;
      this.#showThought();
    }
    if (!text && !tokens) return;
    this.message.content += text;
    (this.message.pieces ??= []).push({ text, tokens });
    this.tokens.add(text, tokens);
  }

  /** The answer is over. */
  finish(figures) {
    this.message.figures = figures;
    this.tokens.finish();
    this.figures.textContent = figures;
    this.busy(false);
    this.#makeKeyable();
  }

  busy(is) {
    this.element.classList.toggle("busy", is);
    this.element.toggleAttribute("aria-busy", is);
  }

  /** Show what went wrong in place of an answer. */
  fail(message) {
    this.busy(false);
    const note = document.createElement("p");
    note.className = "error";
    note.setAttribute("role", "alert");
    note.textContent = message;
    this.element.append(note);
  }

  /** Let the person change the text; `done` is called with true when it changed. */
  edit(done) {
    const box = document.createElement("textarea");
    box.value = this.message.content;
    box.setAttribute("aria-label", "Message text");
    const bar = document.createElement("div");
    bar.className = "row";
    const end = (keep) => {
      if (keep) this.message = Object.assign(this.message, { content: box.value, pieces: undefined, figures: "" });
      bar.remove();
      box.replaceWith(this.text);
      this.show();
      done(keep);
    };
    for (const [name, keep] of [["Save", true], ["Cancel", false]]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.addEventListener("click", () => end(keep));
      bar.append(button);
    }
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") end(false);
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) end(true);
      event.stopPropagation();
    });
    this.text.replaceWith(box);
    box.after(bar);
    box.rows = Math.min(16, box.value.split("\n").length + 1);
    box.focus();
  }

  #showThought() {
    const details = this.element.querySelector(".thought");
    details.hidden = !this.message.thought;
    details.querySelector("div").textContent = this.message.thought ?? "";
  }

  #makeKeyable() {
    const has = this.text.querySelector(".tok") !== null;
    this.text.toggleAttribute("tabindex", has);
    if (!has) return;
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Answer; arrow keys show how likely each token was");
  }
}
