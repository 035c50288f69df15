// What a model can be used for: the route, the body of a request, and how its events are read.

const COMPLETION_TOKENS = 128; // a model that only continues rarely ends by itself

/** Conversations, through the model's chat template. */
export const CHAT = {
  name: "chat",
  path: "/v1/chat/completions",
  maxTokens: null, // sent when neither person nor server sets one; null: what the context holds

  body: (messages, { system, top }) => ({
    messages: (system ? [{ role: "system", content: system }] : []).concat(
      messages.map(({ role, content }) => ({ role, content })),
    ),
    ...(top && { logprobs: true, top_logprobs: top }),
  }),

  /** Return what is new in a choice of an event. */
  read({ delta, logprobs }) {
    const thought = delta?.reasoning_content ?? delta?.reasoning ?? "";
    return { text: delta?.content ?? "", thought, tokens: logprobs?.content };
  },
};

/** Texts that are written on, for models without a chat template: messages are pieces of one. */
export const COMPLETION = {
  name: "completion",
  path: "/v1/completions",
  maxTokens: COMPLETION_TOKENS,

  body: (messages, { top }) => ({
    prompt: messages.map((message) => message.content).join(""),
    ...(top && { logprobs: top }),
  }),

  read: ({ text, logprobs }) => ({ text, thought: "", tokens: logprobs && asTokens(logprobs) }),
};

/** Texts that become vectors. */
export const TEXTS = { name: "texts" };

/** Return the mode for a model, given its card. */
export function modeOf(card) {
  if (card.task !== "generate") return TEXTS;
  return card.has_chat_template === false ? COMPLETION : CHAT;
}

/** The log-probabilities of /v1/completions in the form that /v1/chat/completions has. */
function asTokens({ tokens, token_logprobs, top_logprobs }) {
  return tokens.map((token, index) => ({
    ...named(token, token_logprobs[index]),
    top_logprobs: Object.entries(top_logprobs[index] ?? {})
      .map(([name, logprob]) => named(name, logprob))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}

/** A token by its name, which spells out the bytes of a part of a character. */
function named(name, logprob) {
  const bytes = /^bytes:((?:\\x[0-9a-f]{2})+)$/.exec(name)?.[1].match(/[0-9a-f]{2}/g);
  return { token: name, logprob, bytes: bytes?.map((byte) => parseInt(byte, 16)) };
}
