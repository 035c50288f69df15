// HTTP: one place that knows the key, the error shape and server-sent events.

const KEY = "girih.key";

/** An answer that is an error; `status` is 0 when there was none. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function readKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = readKey();
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function send(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.");
  }
  if (!response.ok) throw new ApiError(await errorText(response), response.status);
  return response;
}

async function errorText(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${text.slice(0, 200)}`;
  }
}

/** GET a JSON document. */
export async function getJson(path) {
  return (await send(path)).json();
}

function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return send(path, { method: "POST", signal, headers, body: JSON.stringify(body) });
}

/** POST a request; returns the JSON of its answer. */
export async function postJson(path, body, signal) {
  return (await post(path, body, signal)).json();
}

/** POST a request that streams; yields the JSON of each event until the end. */
export async function* streamJson(path, body, signal) {
  const response = await post(path, body, signal);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, 500);
    yield event;
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (block.startsWith("data:")) yield block.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
