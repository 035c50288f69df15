"""The requests of a measurement, made from a seed or read from a file."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.kernels.base.errors import ConfigError
from girih.serve.bench.config import DatasetConfig

TRACE_OUTPUT = 64  # tokens, where a trace's line has no output_length
CHARS_PER_TOKEN = 4  # of English text; used where a file gives an answer but not its length
_WORD_LINES = (
    "time year people way day man thing woman life child world school state family student",
    "group country problem hand part place case week company system program question work",
    "government number night point home water room mother area money story fact month lot right",
    "study book eye job word business issue side kind head house service friend father power",
    "hour game line end member law car city community name president team minute idea body",
    "information back parent face others level office door health person art war history party",
    "result change morning reason research girl guy moment air teacher force education",
)
WORDS = tuple(word for line in _WORD_LINES for word in line.split())
"""Short common words: about one token each in most vocabularies."""


@dataclass(frozen=True)
class BenchRequest:
    """One request to send.

    Attributes:
        index: its place in the data set.
        prompt: text, token ids, or chat messages.
        output_len: tokens asked for.
        at: seconds after the start when a trace says so.
    """

    index: int
    prompt: str | list[int] | list[dict[str, Any]]
    output_len: int
    at: float | None = None


def make_requests(config: DatasetConfig, as_text: bool) -> list[BenchRequest]:
    """Return the requests of a data set.

    Args:
        config: which and how many.
        as_text: prompts must be text (chat); else made-up prompts are token ids.

    Raises:
        ConfigError: the file cannot be read or holds nothing usable.
    """
    requests = list(made_requests(config, as_text))
    if not requests:
        raise ConfigError(f"dataset.file {config.file} holds no usable request")
    return requests


def made_requests(config: DatasetConfig, as_text: bool) -> Iterator[BenchRequest]:
    """Yield the same requests one by one, for when there are millions."""
    return itertools.islice(_FROM[config.kind](config, as_text), config.num_requests or None)


class _Maker:
    """Makes prompts of a length: token ids, or words."""

    def __init__(self, config: DatasetConfig, as_text: bool) -> None:
        self._config = config
        self._as_text = as_text
        self.draw = random.Random(config.seed)

    def pieces(self, count: int, draw: random.Random | None = None) -> list[Any]:
        """Return `count` random ids or words."""
        draw = draw or self.draw
        if self._as_text:
            return draw.choices(WORDS, k=count)
        low, high = self._config.token_range
        return [draw.randrange(low, high) for _ in range(count)]

    def prompt(self, pieces: list[Any]) -> str | list[int]:
        """Join pieces to a prompt."""
        return " ".join(pieces) if self._as_text else pieces

    def around(self, length: int) -> int:
        """Return a length that varies by the configured share."""
        reach = int(length * self._config.length_spread)
        return self.draw.randint(length - reach, length + reach) if reach else length


def _random(config: DatasetConfig, as_text: bool) -> Iterator[BenchRequest]:
    maker = _Maker(config, as_text)
    assert config.output_len is not None
    prefixes = [maker.pieces(config.prefix_len) for _ in range(config.num_prefixes)]
    for index in range(config.num_requests):
        shared = prefixes[index % len(prefixes)]
        own = maker.pieces(maker.around(config.input_len))
        yield BenchRequest(index, maker.prompt(shared + own), maker.around(config.output_len))


def _sharegpt(config: DatasetConfig, _: bool) -> Iterator[BenchRequest]:
    """Yield the first question of each conversation, in a seeded order."""
    content = _read(config.file, json.loads)
    if not isinstance(content, list):
        raise ConfigError(f"dataset.file {config.file} is not a JSON list of conversations")
    random.Random(config.seed).shuffle(content)
    index = 0
    for entry in content:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        first = turns[:2] if isinstance(turns, list) else []
        texts = [str(turn.get("value", "")) for turn in first if isinstance(turn, dict)]
        if len(texts) < 2 or not all(texts) or not _can_be_sent(texts):
            continue
        length = config.output_len or max(1, len(texts[1]) // CHARS_PER_TOKEN)
        yield BenchRequest(index, texts[0], length)
        index += 1


def _trace(config: DatasetConfig, as_text: bool) -> Iterator[BenchRequest]:
    """Yield a request per line: `timestamp`, then `prompt`, `messages`, or lengths to make one."""
    maker = _Maker(config, as_text)
    lines = _read(config.file, lambda text: text.split("\n"))  # a text may hold other line ends
    entries = [_entry(config, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    start = min((entry["timestamp"] for entry in entries if "timestamp" in entry), default=0)
    for index, entry in enumerate(entries):
        length = config.output_len or int(entry.get("output_length", TRACE_OUTPUT))
        at = (entry["timestamp"] - start) * config.time_unit if "timestamp" in entry else None
        yield BenchRequest(index, _trace_prompt(config, maker, entry), max(1, length), at)


def _trace_prompt(config: DatasetConfig, maker: _Maker, entry: dict[str, Any]) -> Any:
    for name in ("messages", "prompt"):
        if name in entry:
            return entry[name]
    length = int(entry["input_length"])
    pieces: list[Any] = []
    for hash_id in entry.get("hash_ids", []):  # equal ids are equal tokens: a shared prefix
        pieces += maker.pieces(config.hash_block, random.Random(f"{config.seed}-{hash_id}"))
    pieces = pieces[:length]
    return maker.prompt(pieces + maker.pieces(max(0, length - len(pieces))))


def _entry(config: DatasetConfig, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or not _is_usable(entry):
        raise ConfigError(
            f"dataset.file {config.file}, line {number}: a JSON object with prompt, messages or "
            "input_length is needed (timestamp, input_length and output_length are numbers, "
            f"hash_ids a list), not {line[:80]!r}"
        )
    return entry


def _is_usable(entry: dict[str, Any]) -> bool:
    numbers = [entry[n] for n in ("timestamp", "input_length", "output_length") if n in entry]
    return (
        bool({"messages", "prompt", "input_length"} & set(entry))
        and all(isinstance(value, int | float) for value in numbers)
        and isinstance(entry.get("hash_ids", []), list)
        and _can_be_sent(entry)
    )


def _can_be_sent(value: Any) -> bool:
    """Return whether a value has no half of a character, no NaN, and is not nested too deeply."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _read(file: str | None, parse: Any) -> Any:
    assert file is not None
    try:
        return parse(Path(file).read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"dataset.file {file} cannot be read: {error}") from error


_FROM = {"random": _random, "sharegpt": _sharegpt, "trace": _trace}
