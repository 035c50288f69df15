"""Runs a set of prompts to the end on a core that others may use as well (no event loop)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from girih.kernels.base.errors import EngineError
from girih.runtime.records.messages import EngineFacts
from girih.runtime.records.request import EngineOutput, EngineRequest
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.structured.backends import check as check_structured
from girih.serve.offline.outputs import CompletionOutput, RequestOutput
from girih.serve.offline.shared_client import SharedClient
from girih.serve.text.output_processor import Delta, OutputProcessor
from girih.serve.text.prompts import Prompt, read_prompt, split_n
from girih.serve.text.sampling_defaults import check_room
from girih.serve.text.tokenizer import Tokenizer


@dataclass
class _Running:
    """One of the `n` completions of one prompt, while it runs."""

    processor: OutputProcessor
    parent: RequestOutput
    completion: CompletionOutput


class Batch:
    """A set of prompts handed to the core together and stepped to the end.

    Args:
        facts: what the engine says of itself.
        client: the way to its core.
        tokenizer: its tokenizer.
        items: (request id, prompt, parameters) of each prompt.
    """

    def __init__(
        self,
        facts: EngineFacts,
        client: SharedClient,
        tokenizer: Tokenizer,
        items: Sequence[tuple[str, Prompt, SamplingParams]],
    ) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._client = client
        self._running: dict[str, _Running] = {}
        self._requests: list[EngineRequest] = []
        self.outputs = [self._prepare(*item) for item in items]

    def run(self) -> Iterator[RequestOutput]:
        """Step until all is done; yields each prompt when its last completion ended."""
        for request_id, _ in self._steps():
            parent = self._finish_if_done(request_id)
            if parent is not None:
                yield parent

    def run_deltas(self) -> Iterator[Delta]:
        """Step until all is done; yields every delta."""
        for request_id, delta in self._steps():
            self._finish_if_done(request_id)
            yield delta

    def _finish_if_done(self, request_id: str) -> RequestOutput | None:
        entry = self._running[request_id]
        if not entry.processor.finished:
            return None
        del self._running[request_id]
        parent = entry.parent
        parent.finished = all(out.finish_reason is not None for out in parent.outputs)
        return parent if parent.finished else None

    def _steps(self) -> Iterator[tuple[str, Delta]]:
        try:
            outputs = self._client.submit(self._requests)
            while self._running:
                for output in self._client.wait(outputs):
                    if output.request_id in self._running:
                        yield output.request_id, self._apply(output)
        finally:
            if self._running:  # an error, or a reader that left early
                self._client.abort(list(self._running))

    def _apply(self, output: EngineOutput) -> Delta:
        entry = self._running[output.request_id]
        delta = entry.processor.process(output)
        if delta.finish_reason == "error":
            raise EngineError(f"request {output.request_id} failed: {delta.error}")
        if entry.processor.must_abort:
            self._client.abort([output.request_id])
        completion, parent = entry.completion, entry.parent
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if delta.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + delta.logprobs
            added = sum(record.logprob for record in delta.logprobs)
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + added
        completion.finish_reason = delta.finish_reason
        completion.stop_reason = delta.stop_reason
        parent.prompt_logprobs = delta.prompt_logprobs or parent.prompt_logprobs
        parent.num_cached_tokens = max(parent.num_cached_tokens, delta.num_cached_tokens)
        return delta

    def _prepare(self, request_id: str, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        facts = self._facts
        text, token_ids = read_prompt(prompt, self._tokenizer, facts.vocab_size)
        check_room(len(token_ids), params.max_tokens, facts.max_model_len)
        params.check_vocabulary(facts.vocab_size)
        if params.structured is not None:
            check_structured(params.structured)
        output = RequestOutput(request_id, text, token_ids, [])
        for index, single in enumerate(split_n(params)):
            completion = CompletionOutput(index)
            output.outputs.append(completion)
            request = EngineRequest(
                request_id=f"{output.request_id}-{index}",
                prompt_token_ids=token_ids,
                sampling=single,
                eos_token_ids=tuple(facts.eos_token_ids),
                arrival_time=time.monotonic(),
            )
            self._requests.append(request)
            self._running[request.request_id] = _Running(
                OutputProcessor(self._tokenizer, single, token_ids), output, completion
            )
        return output
