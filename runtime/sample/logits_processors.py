"""Plug-ins that change logits: what they implement, how they are found, and their rows.

    entry points "girih.logits_processors" ─╮
    runtime.logits_processors=[module:Class]─┴▶ load_processors ─▶ ProcessorRows ─▶ sampler
                                                                    (rows come, move, go)

A plug-in lives where the sampler does, in the core's process. It sees a batch at a time, and only
rows that it wants. A request that it fails for ends with an error that names it; to find out which
one that is, rows are shown to it again, fewer at a time.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from girih.kernels.base.errors import ConfigError, GirihError, RequestError
from girih.runtime.isolation import describe
from girih.runtime.records.plans import NewRequest
from girih.runtime.records.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

ENTRY_POINTS = "girih.logits_processors"
IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True)
class RowTokens:
    """Tokens of all rows of the batch, to look into; nothing here may be written.

    Attributes:
        token_ids: int32 [max_num_seqs, max_model_len], prompt first.
        num_tokens: int32 [max_num_seqs], known tokens per row.
        num_prompt_tokens: int32 [max_num_seqs], how many of them are the prompt.
    """

    token_ids: IntArray
    num_tokens: IntArray
    num_prompt_tokens: IntArray

    def output(self, row: int) -> IntArray:
        """Output tokens of a row so far."""
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]


class LogitsProcessor:
    """Base of plug-ins. Rows are places in the batch: a request has one while it runs.

    Args:
        vocab_size: V, the width of the logits.
        max_num_seqs: rows in all; row numbers are below.

    Attributes:
        arguments: keys of `SamplingParams.extra_args` that the plug-in reads.
    """

    arguments: tuple[str, ...] = ()

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs

    def check(self, params: SamplingParams) -> None:
        """Raise `ValueError` when the request's arguments make no sense; called on arrival."""

    def add(self, row: int, request: NewRequest) -> bool:
        """A request enters row `row` (also one that was preempted and comes back with output).

        Returns:
            Whether its logits are to be shown to `apply`.
        """
        raise NotImplementedError

    def drop(self, row: int) -> None:
        """The request of a row that `add` wanted has left."""

    def move(self, source: int, target: int) -> None:
        """The request of row `source`, which `add` wanted, goes on in row `target`."""

    def apply(self, logits: torch.Tensor, rows: IntArray, tokens: RowTokens) -> torch.Tensor:
        """Change logits, after bias and bans, before penalties, greedy choice and temperature.

        May be asked again for rows of the same step, after something failed for others of them.

        Args:
            logits: float32 [A, V], a copy that may be changed in place; -inf for tokens that
                are forbidden. What a grammar forbids stays forbidden whatever comes back.
            rows: int64 [A], their rows in the batch.
            tokens: what all rows hold.

        Returns:
            Logits [A, V].
        """
        raise NotImplementedError


@dataclass(frozen=True)
class NamedProcessor:
    """A plug-in and what to call it."""

    name: str
    processor: LogitsProcessor


@dataclass(frozen=True)
class ActiveProcessor:
    """A plug-in and its rows in one step.

    Attributes:
        name: of the plug-in.
        processor: it.
        index: int64 [A], rows in the logits.
        rows: int64 [A], rows in the batch.
        tokens: what the batch's rows hold.
    """

    name: str
    processor: LogitsProcessor
    index: torch.Tensor
    rows: IntArray
    tokens: RowTokens

    def change(self, logits: torch.Tensor) -> None:
        """Apply it to its rows of `logits` [S, V] in place.

        Raises:
            GirihError: it failed.
        """
        own = logits[self.index]
        shape = own.shape
        with _naming(self.name):
            own = self.processor.apply(own, self.rows, self.tokens)
            if own.shape != shape:
                raise ValueError(f"it gave logits {list(own.shape)} for {list(shape)}")
            if bool(torch.isnan(own).any()):
                raise ValueError("it gave logits that are not numbers")
        logits[self.index] = own


class ProcessorRows:
    """Which plug-in wants which rows of the batch.

    Args:
        processors: all plug-ins, in the order they are applied.
        max_num_seqs: rows.
    """

    def __init__(self, processors: Sequence[NamedProcessor], max_num_seqs: int) -> None:
        self._processors = tuple(processors)
        self._wanted = np.zeros((len(self._processors), max_num_seqs), bool)

    def add(self, row: int, request: NewRequest) -> bool:
        """A request enters a row; whether any plug-in has to do with it.

        Raises:
            GirihError: a plug-in failed.
        """
        for wanted, named in zip(self._wanted, self._processors, strict=True):
            with _naming(named.name):
                wanted[row] = named.processor.add(row, request)
        return bool(self._wanted[:, row].any())

    def drop(self, row: int) -> None:
        """The request of a row leaves; raises as `add`, when every plug-in has been told."""
        self._tell(row, lambda processor: processor.drop(row))

    def move(self, source: int, target: int) -> None:
        """The request of row `source` goes on in row `target`; raises as `drop`."""
        self._wanted[:, target] = self._wanted[:, source]
        self._tell(source, lambda processor: processor.move(source, target))

    def _tell(self, row: int, news: Callable[[LogitsProcessor], object]) -> None:
        """Tell the plug-ins that wanted `row`, which holds no request of theirs from now on."""

        def call(named: NamedProcessor) -> None:
            with _naming(named.name):
                news(named.processor)

        with contextlib.ExitStack() as calls:  # whatever one of them raises, all are called
            for place in np.flatnonzero(self._wanted[:, row]).tolist():
                calls.callback(call, self._processors[place])
            self._wanted[:, row] = False

    def active(self, rows: IntArray, tokens: RowTokens) -> tuple[ActiveProcessor, ...]:
        """Plug-ins that want some of `rows`, the rows of a step's logits in order."""
        found = []
        for wanted, named in zip(self._wanted, self._processors, strict=True):
            index = np.flatnonzero(wanted[rows])
            if len(index):
                place = torch.from_numpy(index)
                found.append(
                    ActiveProcessor(named.name, named.processor, place, rows[index], tokens)
                )
        return tuple(found)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Have an error say which plug-in failed."""
    try:
        yield
    except Exception as error:
        raise GirihError(f"logits processor {name} failed: {describe(error)}") from error


def check_arguments(processors: Sequence[NamedProcessor], params: SamplingParams) -> None:
    """Hold a request's extra arguments against what plug-ins take.

    Raises:
        RequestError: nobody takes a key, or a plug-in refuses a value.
    """
    for key in params.extra_args or ():
        if not any(key in named.processor.arguments for named in processors):
            known = sorted({a for named in processors for a in named.processor.arguments})
            taken = (
                f"takes {', '.join(known)}" if known else "has no logits processor that takes any"
            )
            raise RequestError(
                f"extra_args has the key {key[:80]!r}; this engine {taken}", param="extra_args"
            )
    for named in processors:
        try:
            named.processor.check(params)
        except GirihError:
            raise
        except Exception as error:
            raise RequestError(
                f"logits processor {named.name} refuses extra_args: {error}", param="extra_args"
            ) from error


def load_processors(
    names: Sequence[str], vocab_size: int, max_num_seqs: int
) -> tuple[NamedProcessor, ...]:
    """Make the plug-ins of installed packages, then those that are named.

    Args:
        names: "module:Class" each.
        vocab_size: width of the logits.
        max_num_seqs: rows of the batch.

    Raises:
        ConfigError: one cannot be imported or made, or is no `LogitsProcessor`; names it.
    """
    points = sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda p: p.name)
    wanted = [(point.name, point.value) for point in points] + [(name, name) for name in names]
    made = tuple(
        NamedProcessor(name, _make(name, value, vocab_size, max_num_seqs)) for name, value in wanted
    )
    if made:
        logger.info("logits processors: %s", ", ".join(named.name for named in made))
    return made


def _make(name: str, value: str, vocab_size: int, max_num_seqs: int) -> LogitsProcessor:
    try:
        kind = _find(value)
        if not (isinstance(kind, type) and issubclass(kind, LogitsProcessor)):
            raise TypeError(f"{value} is no subclass of {__name__}.LogitsProcessor")
        processor: LogitsProcessor = kind(vocab_size, max_num_seqs)
    except Exception as error:
        raise ConfigError(
            f"logits processor {name} cannot be used: {type(error).__name__}: {error}. It is named "
            f"as module:Class in runtime.logits_processors, or by the entry points {ENTRY_POINTS}"
        ) from error
    return processor


def _find(value: str) -> Any:
    module, _, path = value.partition(":")
    if not module or not path:
        raise ValueError(f"{value!r} is not of the form module:Class")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
