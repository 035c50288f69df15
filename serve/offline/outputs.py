"""Results of `LLM` (field names as in vLLM's offline API)."""

from __future__ import annotations

from dataclasses import dataclass, field

from girih.runtime.records.request import TokenLogprobs


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which of the prompt's `n` completions.
        text: the text, stop string removed unless asked for.
        token_ids: generated ids, an end token included.
        logprobs: one entry per token when asked for.
        cumulative_logprob: sum over the tokens, or None without logprobs.
        finish_reason: "stop" or "length"; None until then.
        stop_reason: the stop string or stop token id; None for the model's end token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """Everything about one prompt.

    Attributes:
        request_id: the prompt's id.
        prompt: the prompt as text, or None when ids were given.
        prompt_token_ids: the prompt as ids.
        outputs: `n` completions.
        prompt_logprobs: one entry per prompt token (first is None) when asked for.
        num_cached_tokens: prompt tokens found in the prefix cache.
        finished: whether all completions ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of a text.

    Attributes:
        prompt_token_ids: the text as ids.
        embedding: the vector; one per token where the model pools nothing.
        num_cached_tokens: tokens found in the prefix cache.
    """

    prompt_token_ids: list[int]
    embedding: list[float] | list[list[float]]
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class ClassificationOutput:
    """A classifier's result for a text.

    Attributes:
        prompt_token_ids: the text as ids.
        label: the name of the largest value.
        probs: one value per label.
        num_cached_tokens: tokens found in the prefix cache.
    """

    prompt_token_ids: list[int]
    label: str
    probs: list[float]
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class ScoreOutput:
    """The score of two texts.

    Attributes:
        score: of a cross-encoder what its head says, of an embedder the cosine of both embeddings.
        num_prompt_tokens: tokens computed for this pair (a text scored against several counts
            once, with the first).
        num_cached_tokens: those of them found in the prefix cache.
    """

    score: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
