"""Texts that become vectors: what is asked of the core for them, and what its answers mean.

    texts or pairs ─▶ PooledText (ids, params) ─▶ core ─▶ bytes ─▶ vector, label, score

Shared by `LLM` and the HTTP routes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from girih.kernels.base.errors import RequestError
from girih.runtime.records.messages import EngineFacts
from girih.runtime.records.pooling_params import PoolingFacts, PoolingParams
from girih.serve.text.prompts import check_prompt_ids
from girih.serve.text.tokenizer import Tokenizer

TASK_USES = {
    "generate": "it generates: use /v1/chat/completions or /v1/completions, LLM.generate",
    "embed": "it embeds: use /v1/embeddings, /v1/score or /v1/rerank, LLM.embed or LLM.score",
    "classify": "it classifies: use /v1/classify, or /v1/score and /v1/rerank where it has one "
    "label, LLM.classify or LLM.score",
}


@dataclass(frozen=True)
class PooledText:
    """One text, or pair, on its way to the core.

    Attributes:
        token_ids: what the model reads.
        params: how its vector is finished.
    """

    token_ids: list[int]
    params: PoolingParams


@dataclass(frozen=True)
class TextOptions:
    """Options of reading texts and finishing their vectors.

    Attributes:
        truncate: most tokens of a text; -1 as many as the model takes; None refuses longer ones.
        add_special_tokens: put the marks that the model expects.
        params: for every text.
    """

    truncate: int | None = None
    add_special_tokens: bool = True
    params: PoolingParams = field(default_factory=PoolingParams)

    def limit(self, longest: int) -> int | None:
        """Most tokens of a text; None for no cut.

        Raises:
            RequestError: it is 0 or below -1.
        """
        if self.truncate is None:
            return None
        if self.truncate == 0 or self.truncate < -1:
            raise RequestError(
                f"truncate_prompt_tokens is {self.truncate}; it must be at least 1, or -1 for as "
                f"many as the model takes ({longest})",
                param="truncate_prompt_tokens",
            )
        return longest if self.truncate == -1 else min(self.truncate, longest)


def require_task(facts: EngineFacts, wanted: Sequence[str]) -> None:
    """Raise `RequestError` unless the model has one of the tasks."""
    if facts.task not in wanted:
        raise RequestError(does_not(wanted, facts.task, facts.name), param="model")


def does_not(wanted: Sequence[str], task: str, name: str) -> str:
    """Say that a model has none of the tasks, and how to use the one it has."""
    return f"the model {name!r} does not {' or '.join(wanted)}; {TASK_USES[task]}"


def pooling_of(facts: EngineFacts) -> PoolingFacts:
    """Return the pooling of a model that does not generate."""
    assert facts.pooling is not None, f"a model with task {facts.task!r} says how it pools"
    return facts.pooling


def read_text(
    text: str | list[int], tokenizer: Tokenizer, facts: EngineFacts, options: TextOptions
) -> PooledText:
    """Read a text, or one that is token ids already (those are not framed by marks).

    Raises:
        RequestError: it is empty, has an unknown id, or the limit leaves no room.
    """
    limit = options.limit(facts.max_model_len)
    if isinstance(text, str):
        marks = options.add_special_tokens
        ids = tokenizer.encode_framed(text, limit=limit, add_special_tokens=marks)[0]
    else:
        ids = list(text) if limit is None else text[:limit]
    _check_ids(ids, facts)
    return PooledText(ids, options.params)


def read_pair(
    first: str, second: str, tokenizer: Tokenizer, facts: EngineFacts, options: TextOptions
) -> PooledText:
    """Read two texts that a cross-encoder looks at together.

    Raises:
        RequestError: as `read_text`.
    """
    limit = options.limit(facts.max_model_len)
    ids, types = tokenizer.encode_framed(first, second, limit, options.add_special_tokens)
    _check_ids(ids, facts)
    given = types if pooling_of(facts).has_token_types else None
    params = PoolingParams(use_activation=options.params.use_activation, token_types=given)
    return PooledText(ids, params)


def _check_ids(ids: list[int], facts: EngineFacts) -> None:
    try:
        check_prompt_ids(ids, facts.vocab_size)
    except RequestError as error:
        text = str(error).replace("the prompt", "the text")
        raise RequestError(text, "input", error.code) from error


def check_dimensions(dimensions: int | None, pooling: PoolingFacts) -> None:
    """Raise `RequestError` for a length that embeddings of this model cannot be cut to."""
    if dimensions is None or dimensions == pooling.width:
        return
    if not pooling.can_cut:
        raise RequestError(
            f"dimensions is {dimensions}, but the model's embeddings have {pooling.width} and its "
            "files do not say that they may be cut (matryoshka_dimensions); leave it out, or start "
            "with model.matryoshka=true",
            param="dimensions",
        )
    allowed = pooling.dimensions
    if not 1 <= dimensions <= pooling.width or (allowed and dimensions not in allowed):
        said = f"one of {', '.join(map(str, allowed))}" if allowed else f"1 to {pooling.width}"
        raise RequestError(f"dimensions is {dimensions}; it must be {said}", param="dimensions")


def vector_of(pooled: bytes) -> list[float]:
    """The values of an answer of the core."""
    return array("f", pooled).tolist()


def embedding_of(pooled: bytes, pooling: PoolingFacts, width: int) -> Any:
    """An embedding; a list of them where the model gives one per token."""
    values = vector_of(pooled)
    if pooling.mode != "all":
        return values
    return [values[start : start + width] for start in range(0, len(values), width)]


def label_of(probs: Sequence[float], pooling: PoolingFacts) -> str:
    """The name of the largest value."""
    return pooling.labels[max(range(len(probs)), key=probs.__getitem__)]


# ---- scores ----


@dataclass(frozen=True)
class ScorePlan:
    """The computations that score pairs of texts.

    Attributes:
        texts: for the core.
        pairs: per score the places in `texts` whose vectors make it: one of a cross-encoder, two
            of an embedder.
    """

    texts: list[PooledText]
    pairs: list[tuple[int, ...]]

    def scores(self, pooled: Sequence[bytes]) -> list[float]:
        """The scores, from the core's answers."""
        vectors = [vector_of(data) for data in pooled]
        return [
            vectors[places[0]][0] if len(places) == 1 else _dot(*(vectors[p] for p in places))
            for places in self.pairs
        ]

    def token_counts(self) -> list[int]:
        """Per score the tokens that are computed for it and for none before it."""
        before: set[int] = set()
        counts = []
        for places in self.pairs:
            new = {*places} - before
            before |= new
            counts.append(sum(len(self.texts[place].token_ids) for place in new))
        return counts


def match_pairs(
    first: str | list[str], second: str | list[str], names: tuple[str, str]
) -> list[tuple[str, str]]:
    """Pair texts: one against many, or as many against as many.

    Args:
        first: texts.
        second: the texts they are held against.
        names: of both fields, for errors.

    Raises:
        RequestError: the counts do not fit, or there is none.
    """
    a = [first] if isinstance(first, str) else first
    b = [second] if isinstance(second, str) else second
    if len(a) == 1:
        a = a * len(b)
    if not b or len(a) != len(b):
        raise RequestError(
            f"{names[0]} has {len(a)} texts and {names[1]} {len(b)}; give one text or as many as "
            f"in {names[1]}, at least one",
            param=names[0],
        )
    return list(zip(a, b, strict=True))


def plan_scores(
    pairs: Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
    facts: EngineFacts,
    options: TextOptions,
) -> ScorePlan:
    """Plan the computations that score pairs.

    Raises:
        RequestError: the model cannot score, or a text cannot be read.
    """
    pooling = pooling_of(facts)
    if facts.task == "classify":
        if pooling.width != 1:
            raise RequestError(
                f"the model {facts.name!r} has {pooling.width} labels, so it gives no score; use "
                "/v1/classify",
                param="model",
            )
        texts = [read_pair(a, b, tokenizer, facts, options) for a, b in pairs]
        return ScorePlan(texts, [(place,) for place in range(len(texts))])
    if pooling.mode == "all":
        raise RequestError(
            "the model gives one vector per token (model.pooling=all), which have no score",
            param="model",
        )
    normalised = TextOptions(
        options.truncate, options.add_special_tokens, PoolingParams(use_activation=True)
    )
    places = {text: place for place, text in enumerate(dict.fromkeys(chain.from_iterable(pairs)))}
    texts = [read_text(text, tokenizer, facts, normalised) for text in places]
    return ScorePlan(texts, [(places[a], places[b]) for a, b in pairs])


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
