// Puts the page together: views, colours, state of the server.

import { clear, request, setChatMode, startChat } from "/web/chat.js";
import { copyText, toast } from "/web/clipboard.js";
import { CHAT, COMPLETION, modeOf, TEXTS } from "/web/modes.js";
import { asCurl, askForKey, loadModels, startSettings } from "/web/settings.js";
import { startStatus } from "/web/status.js";
import { clearTexts, describeTexts, startTexts, textsRequest } from "/web/texts.js";

const THEMES = ["system", "light", "dark"];
const THEME = "girih.theme";
const MODE = "girih.mode";
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

/** Show what the model is for; until it is known, what the last one was for. */
function setMode(mode) {
  document.body.dataset.mode = mode.name;
  localStorage.setItem(MODE, mode.name);
  const [name, title] = mode === TEXTS ? ["Texts", "Clear the answers"] : ["Chat", "New conversation"];
  byId("main-view").textContent = mode === COMPLETION ? "Text" : name;
  byId("new").title = mode === COMPLETION ? "New text" : title;
  if (mode !== TEXTS) setChatMode(mode);
}

async function onReady() {
  const card = await loadModels();
  setMode(modeOf(card));
  if (isTexts()) describeTexts(card);
}

const isTexts = () => document.body.dataset.mode === TEXTS.name;

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
  if (knownModel !== status.model) {
    await onReady();
    knownModel = status.model;
  }
  showState("good", status.model);
}

const onError = (error) => askForKey(error.status === 401);
startTheme();
startChat(onError);
startTexts(onError);
setMode([CHAT, COMPLETION, TEXTS].find((mode) => mode.name === localStorage.getItem(MODE)) ?? CHAT);
const refresh = startStatus(onStatus);
startSettings(refresh);
byId("new").addEventListener("click", () => (isTexts() ? clearTexts() : clear()));
byId("copy-curl").addEventListener("click", () => copyText(asCurl(isTexts() ? textsRequest() : request())));
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => setView(button.dataset.view));
}
if (matchMedia("(min-width: 900px)").matches) byId("input").focus();
