"""From the core's token ids to what a reader sees: text deltas, stop strings, logprobs.

One `OutputProcessor` per request. It is the only place that applies stop strings; when one is
completed the delta says so and the caller aborts the request in the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from girih.runtime.records.request import EngineOutput, TokenLogprobs
from girih.runtime.records.sampling_params import SamplingParams
from girih.serve.text.detokenizer import Detokenizer, Vocabulary


@dataclass
class Delta:
    """News of one request; deltas of a slow reader are merged into one.

    Attributes:
        text: characters that became visible.
        token_ids: new token ids.
        logprobs: one per new token when asked for.
        prompt_logprobs: one per prompt token, once.
        finish_reason: set on the last delta.
        stop_reason: the stop string or stop token id, if one ended the output.
        num_cached_tokens: prompt tokens found in the prefix cache.
        error: why the request failed, for finish reason "error".
        code: the word clients are given for it.
        pooled: the vector asked for instead of tokens, little-endian float32.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    code: str = "generation_failed"
    pooled: bytes | None = None

    def merge(self, later: Delta) -> None:
        """Append `later` to this delta."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = (self.prompt_logprobs or []) + later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        self.error, self.code = later.error, later.code
        self.pooled = later.pooled or self.pooled


class OutputProcessor:
    """Turns the core's records of one request into deltas."""

    def __init__(
        self, vocabulary: Vocabulary, sampling: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self._keep_stop = sampling.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            vocabulary,
            stop=sampling.stop,
            include_stop=self._keep_stop,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=sampling.skip_special_tokens,
            context=prompt_token_ids,
        )
        self.finished = False
        self.must_abort = False

    def process(self, output: EngineOutput) -> Delta:
        """Return the delta of one record; sets `must_abort` when a stop string was completed."""
        if self.finished:
            return Delta()
        token_ids = output.new_token_ids
        ended_by_id = output.finish_reason == "stop"
        # A stop token ends the text; it is counted, but not shown unless asked for.
        shown_ids = token_ids[:-1] if ended_by_id and not self._keep_stop else token_ids
        step = self._detokenizer.push(shown_ids)
        text, stop = step.text, step.stop
        count = step.num_tokens if stop is not None else len(token_ids)
        if stop is None and output.finish_reason is not None:
            last = self._detokenizer.finish()
            text, stop = text + last.text, last.stop
        delta = Delta(
            text=text,
            token_ids=token_ids[:count],
            logprobs=output.logprobs[:count] if output.logprobs is not None else None,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason="stop" if stop is not None else output.finish_reason,
            stop_reason=stop if stop is not None else output.stop_reason,
            num_cached_tokens=output.num_cached_tokens,
            error=output.error,
            pooled=output.pooled,
        )
        self.finished = delta.finish_reason is not None
        self.must_abort = stop is not None and output.finish_reason is None
        return delta
