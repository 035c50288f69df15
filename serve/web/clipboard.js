// Copying text, also on pages that came over plain HTTP, where browsers offer no clipboard.

let timer = 0;

/** Show a short note for a moment. */
export function toast(text) {
  const box = document.getElementById("toast");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(() => (box.hidden = true), 1800);
}

/** Copy text, and say so. */
export async function copyText(text) {
  const isDone = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  toast(isDone || copyBySelection(text) ? "Copied" : "This browser does not let the page copy");
}

function copyBySelection(text) {
  const before = document.activeElement;
  const box = document.createElement("textarea");
  box.value = text;
  box.className = "unseen";
  document.body.append(box);
  box.select();
  const isDone = document.execCommand("copy");
  box.remove();
  before?.focus();
  return isDone;
}
