// Puts the page together: views, colours, state of the server.

import { clear, messages, startChat } from "/web/chat.js";
import { asCurl, askForKey, loadModels, startSettings } from "/web/settings.js";
import { startStatus } from "/web/status.js";

const THEMES = ["system", "light", "dark"];
const THEME = "girih.theme";
const byId = (id) => document.getElementById(id);
let knownModel = null;

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").title = theme === "system" ? "Colours: as the system" : `Colours: ${theme}`;
  localStorage.setItem(THEME, theme);
}

function startTheme() {
  setTheme(THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "system");
  byId("theme").addEventListener("click", () => {
    const now = THEMES.indexOf(localStorage.getItem(THEME));
    setTheme(THEMES[(now + 1) % THEMES.length]);
    toast(byId("theme").title);
  });
}

function setView(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === view));
  }
}

let toastTimer = 0;
function toast(text) {
  const box = byId("toast");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (box.hidden = true), 1800);
}

function showState(state, text) {
  byId("state").dataset.state = state;
  if (byId("state-text").textContent !== text) byId("state-text").textContent = text;
}

async function onStatus(status, error) {
  if (error) {
    knownModel = null;
    askForKey(error.status === 401);
    showState("bad", error.status === 401 ? "needs an API key" : "no answer");
    return;
  }
  if (status.status !== "ready") {
    knownModel = null;
    const steps = status.total ? ` ${status.done}/${status.total}` : "";
    const text = status.stage ? `${status.stage}${steps}` : status.status;
    showState(status.status === "failed" ? "bad" : "wait", text);
    return;
  }
  showState("good", status.model);
  if (knownModel !== status.model) {
    knownModel = status.model;
    await loadModels().catch(() => (knownModel = null));
  }
}

startTheme();
startChat((error) => askForKey(error.status === 401));
const refresh = startStatus(onStatus);
startSettings(refresh);
byId("new").addEventListener("click", clear);
byId("copy-curl").addEventListener("click", async () => {
  await navigator.clipboard.writeText(asCurl(messages()));
  toast("Copied");
});
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => setView(button.dataset.view));
}
if (matchMedia("(min-width: 900px)").matches) byId("input").focus();
