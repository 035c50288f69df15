"""The offline API: `LLM(model).generate(prompts, params)`, with the core run inline.

A model that embeds or classifies has `embed`, `classify` and `score` instead.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from girih.kernels.base.errors import RequestError
from girih.kernels.base.garbage import no_collection
from girih.kernels.base.progress import Progress, no_progress
from girih.runtime.client.client import CoreClient
from girih.runtime.client.local_transport import SteppedTransport
from girih.runtime.client.transport import BuiltEngine, Transport
from girih.runtime.records.config import EngineConfig
from girih.runtime.records.pooling_params import PoolingParams
from girih.runtime.records.sampling_params import SamplingParams
from girih.serve.offline.batch import Batch
from girih.serve.offline.beam_search import BeamSearch, BeamSearchParams, BeamSequence
from girih.serve.offline.options import engine_config
from girih.serve.offline.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    RequestOutput,
    ScoreOutput,
)
from girih.serve.offline.pooling import run_texts
from girih.serve.offline.shared_client import SharedClient
from girih.serve.text.detokenizer import decode_output
from girih.serve.text.output_processor import Delta
from girih.serve.text.prompts import Prompt, as_prompt_list, check_form, read_prompt, shortened
from girih.serve.text.sampling_defaults import SamplingDefaults, read_generation_config
from girih.serve.text.texts import (
    TextOptions,
    check_dimensions,
    embedding_of,
    label_of,
    match_pairs,
    plan_scores,
    pooling_of,
    read_text,
    require_task,
    vector_of,
)
from girih.serve.text.tokenizer import Tokenizer
from girih.serve.text.tokenizer_ahead import TokenizerAhead


class LLM:
    """A model, ready to generate, embed or classify.

    Threads may share it, and calls may be made while a `stream` is read: what runs at the same time
    runs in one batch.

    Args:
        model: HF directory, `.gguf` file, hub id, or a built-in name.
        progress: observer of the start-up work.
        options: fields of the engine configuration by their plain names, e.g.
            `LLM("smollm2", dtype="float32", opt="O0", max_num_seqs=8, bundle="DIR")`.

    Attributes:
        facts: what the engine says of itself: name, key, lengths, task.
        tokenizer: the model's.
        defaults: sampling values where a call gives none.

    Raises:
        ConfigError: an unknown option, or a value it may not have.
        GirihError: the model cannot be found, compiled or loaded.
    """

    def __init__(
        self, model: str = "smollm2", *, progress: Progress = no_progress, **options: Any
    ) -> None:
        self._build(engine_config(model, options), progress)

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Progress = no_progress) -> LLM:
        """Build the engine that `config` describes."""
        llm = cls.__new__(cls)
        llm._build(config, progress)
        return llm

    @classmethod
    def from_engine(cls, engine: BuiltEngine, tokenizer: Tokenizer) -> LLM:
        """Wrap an engine that is already built."""
        llm = cls.__new__(cls)
        llm._attach(SteppedTransport(lambda progress: engine), no_progress, tokenizer)
        return llm

    def _build(self, config: EngineConfig, progress: Progress) -> None:
        with no_collection():
            self._attach(_transport(config), progress)

    def close(self) -> None:
        """End the engine (its process too, if it has one); the object is not used afterwards."""
        self._client.close()

    def _attach(
        self, transport: Transport, progress: Progress, tokenizer: Tokenizer | None = None
    ) -> None:
        ahead = TokenizerAhead(progress)
        self._client = SharedClient(CoreClient(transport, ahead.on_progress))
        try:
            self.facts = self._client.start()
            path = Path(self.facts.model_path)
            self.tokenizer = ahead.result(path) if tokenizer is None else tokenizer
            self.defaults = SamplingDefaults(read_generation_config(path))
        except BaseException:
            self._client.close()
            raise
        weakref.finalize(self, self._client.close)  # a core's process ends with this object
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one batch.

        Args:
            prompts: text, token ids, `{"prompt_token_ids": [...]}`, or a list of these.
            params: one for all, or one per prompt; None takes the model's defaults.
            use_progress: draw a bar on stderr.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or parameter cannot be served.
            EngineError: one failed in the engine; the others of this call are dropped.
        """
        batch = as_prompt_list(prompts)
        chosen = _params_per_prompt(params, len(batch), self.defaults)
        group = self._batch(batch, chosen)
        if not use_progress:
            list(group.run())
            return group.outputs
        from girih.serve.progress import finished_bar

        with finished_bar(len(batch)) as bar:
            for _ in group.run():
                bar.advance(bar.task_ids[0])
        return group.outputs

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; messages are {"role", "content"} dicts."""
        prompts: list[Prompt] = [
            {"prompt_token_ids": self.render_chat(conversation, **template_options)}
            for conversation in _conversations(messages)
        ]
        return self.generate(prompts, params, use_progress)

    def render_chat(self, messages: list[dict[str, Any]], **template_options: Any) -> list[int]:
        """Return the token ids of a conversation in the model's chat format."""
        text = self.tokenizer.render_chat(messages, **template_options)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Yield the deltas of one completion as they come."""
        check_form(prompt, "prompt")
        chosen = _params_per_prompt(params, 1, self.defaults)[0]
        yield from self._batch([prompt], [msgspec.structs.replace(chosen, n=1)]).run_deltas()

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | None = None
    ) -> list[list[BeamSequence]]:
        """Search the most likely completions of prompts.

        Returns:
            `beam_width` sequences per prompt, the best first.

        Raises:
            RequestError: a prompt cannot be served, or leaves no room for `max_tokens`.
        """
        params = BeamSearchParams() if params is None else params
        if not isinstance(params, BeamSearchParams):
            raise RequestError(
                f"params is {shortened(params)}; it must be a BeamSearchParams, e.g. "
                "BeamSearchParams(beam_width=4)",
                param="params",
            )
        vocab_size, limit = self.facts.vocab_size, self.facts.max_model_len
        ids = [read_prompt(p, self.tokenizer, vocab_size)[1] for p in as_prompt_list(prompts)]
        longest = max(map(len, ids), default=0)
        if longest + params.max_tokens > limit:
            raise RequestError(
                f"a prompt has {longest} tokens and max_tokens is {params.max_tokens}; "
                f"max_model_len allows {limit} together",
                param="max_tokens",
            )
        search = BeamSearch(self.generate, params, self.facts.eos_token_ids)
        found = search.run(ids)
        for sequence in (sequence for group in found for sequence in group):
            sequence.text = decode_output(self.tokenizer, sequence.token_ids)
        return found

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """Embed texts, all in one batch.

        Args:
            texts: text, token ids, or a list of these.
            dimensions: cut embeddings to their first values (models made for it).
            use_activation: bring them to length 1; None does as the model's files say.
            truncate_prompt_tokens: most tokens of a text, -1 as many as the model takes; None
                refuses longer ones.

        Raises:
            RequestError: the model does not embed, or a text or parameter cannot be served.
        """
        facts = self.facts
        require_task(facts, ("embed",))
        pooling = pooling_of(facts)
        check_dimensions(dimensions, pooling)
        params = PoolingParams(dimensions=dimensions, use_activation=use_activation)
        width = dimensions or pooling.width
        return [
            EmbeddingOutput(ids, embedding_of(pooled, pooling, width), cached)
            for ids, pooled, cached in self._pooled(texts, truncate_prompt_tokens, params)
        ]

    def classify(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationOutput]:
        """Classify texts, all in one batch.

        Args:
            texts: text, token ids, or a list of these.
            use_activation: False gives the head's values as they are.
            truncate_prompt_tokens: as in `embed`.

        Raises:
            RequestError: the model does not classify, or a text cannot be served.
        """
        facts = self.facts
        require_task(facts, ("classify",))
        pooling, params = pooling_of(facts), PoolingParams(use_activation=use_activation)
        found = []
        for ids, pooled, cached in self._pooled(texts, truncate_prompt_tokens, params):
            probs = vector_of(pooled)
            found.append(ClassificationOutput(ids, label_of(probs, pooling), probs, cached))
        return found

    def score(
        self,
        first: str | list[str],
        second: str | list[str],
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoreOutput]:
        """Score texts against others: one against many, or as many against as many.

        Args:
            first: texts, a query for example.
            second: the texts they are held against.
            use_activation: False gives a cross-encoder's values as they are.
            truncate_prompt_tokens: as in `embed`.

        Raises:
            RequestError: the model gives no scores, or a text cannot be served.
        """
        facts = self.facts
        require_task(facts, ("embed", "classify"))
        params = PoolingParams(use_activation=use_activation)
        options = TextOptions(truncate_prompt_tokens, params=params)
        _check_texts("first", first)
        _check_texts("second", second)
        pairs = match_pairs(first, second, ("first", "second"))
        plan = plan_scores(pairs, self.tokenizer, facts, options)
        outputs = run_texts(self._client, plan.texts, self._names(len(plan.texts)))
        scores = plan.scores([output.pooled or b"" for output in outputs])
        return [
            ScoreOutput(score, num_tokens, outputs[places[-1]].num_cached_tokens)
            for score, num_tokens, places in zip(
                scores, plan.token_counts(), plan.pairs, strict=True
            )
        ]

    def _pooled(
        self, texts: Prompt | Sequence[Prompt], truncate: int | None, params: PoolingParams
    ) -> Iterator[tuple[list[int], bytes, int]]:
        """(token ids, vector, cached tokens) of each text."""
        options, facts = TextOptions(truncate, params=params), self.facts
        read = [
            read_text(_plain(text), self.tokenizer, facts, options)
            for text in as_prompt_list(texts, "texts")
        ]
        for text, output in zip(
            read, run_texts(self._client, read, self._names(len(read))), strict=True
        ):
            yield text.token_ids, output.pooled or b"", output.num_cached_tokens

    def _names(self, count: int) -> list[str]:
        return [str(next(self._ids)) for _ in range(count)]

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._client.call("reset_prefix_cache")

    def sleep(self, level: int = 1) -> None:
        """Give up weights and KV cache (level 1), compiled code too (level 2), until `wake`.

        Raises:
            RequestError: no such level.
            BusyError: a `stream` was not read to its end.
        """
        self._client.call("sleep", level=level)

    def wake(self) -> None:
        """Take back what `sleep` gave up: weights are read again from the model's files."""
        self._client.call("wake")

    def reload_weights(self, path: str | None = None) -> None:
        """Load other weights of the same model; the tokenizer stays.

        Args:
            path: a model source; None reads the present files again.

        Raises:
            RequestError: they are of another model, or cannot be read; the old ones stay.
            BusyError: a `stream` was not read to its end.
        """
        self._client.call("reload_weights", path=path)

    def _batch(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Batch:
        require_task(self.facts, ("generate",))
        items = [
            (str(next(self._ids)), prompt, chosen)
            for prompt, chosen in zip(prompts, params, strict=True)
        ]
        return Batch(self.facts, self._client, self.tokenizer, items)


def _plain(prompt: Prompt) -> str | list[int]:
    """A text or ids, out of the dictionary that may hold them."""
    if not isinstance(prompt, dict):
        return prompt
    found = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if not isinstance(found, str | list):
        raise RequestError(
            f"a text dict has the keys {sorted(prompt)}; it needs 'prompt' or 'prompt_token_ids'",
            param="input",
        )
    return found


def _check_texts(name: str, texts: Any) -> None:
    items = [texts] if isinstance(texts, str) else texts
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise RequestError(
            f"{name} is {shortened(texts)}; it must be text, or a list of texts", param=name
        )


def _conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation, or several, as several.

    Raises:
        RequestError: something else; says what a conversation is.
    """
    is_list = isinstance(messages, list | tuple) and len(messages) > 0
    many = messages if is_list and isinstance(messages[0], list | tuple) else [messages]
    for conversation in many:
        is_list = isinstance(conversation, list | tuple) and len(conversation) > 0
        if not is_list or not all(isinstance(message, dict) for message in conversation):
            raise RequestError(
                f"messages is {shortened(messages)}; it must be a list of messages such as "
                "{'role': 'user', 'content': 'Hello'}, at least one, or a list of such lists",
                param="messages",
            )
    return list(many)


def _transport(config: EngineConfig) -> Transport:
    if config.runtime.process == "process":
        from girih.runtime.client.supervisor import ProcessTransport
        from girih.serve.engine.build import build_core
        from girih.serve.logs import LogSettings

        return ProcessTransport(functools.partial(build_core, config, LogSettings("WARNING")))
    from girih.runtime.start.launch import build_engine

    return SteppedTransport(functools.partial(build_engine, config))


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    defaults: SamplingDefaults,
) -> list[SamplingParams]:
    if params is None:
        params = defaults.build({}, max_tokens=16)
    if isinstance(params, SamplingParams):
        return [params] * count
    is_list = isinstance(params, list | tuple)
    if not is_list or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(
            f"params is {shortened(params)}; it must be a SamplingParams, e.g. "
            "SamplingParams(temperature=0), or a list with one per prompt",
            param="params",
        )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling parameters were given for {count} prompts; give one, or one "
            "per prompt",
            param="params",
        )
    return list(params)
