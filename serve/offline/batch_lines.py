"""Lines of a batch: reading the requests, and the part of the answers that is there already.

Whatever bytes a line holds, it alone is refused: reading it does not raise.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from girih.kernels.base.errors import ConfigError
from girih.serve.text.chat_messages import json_type

MAX_ID = 512
MAX_LINE = 256 * 2**20  # bytes; more than a server takes
MAX_SHOWN = 80
ROUTE = re.compile(r"/(?!/)[\w./~%?=&:,@+-]{0,500}", re.ASCII)


@dataclass(frozen=True)
class BatchLine:
    """One line of the input.

    Attributes:
        number: its line number, from 1.
        custom_id: the caller's name for it; None when the line has none.
        url: the route, e.g. /v1/chat/completions.
        body: what is sent, as JSON.
        problem: why it cannot be sent, or None.
    """

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: str | None = None


def read_lines(file: str) -> Iterator[BatchLine]:
    """Yield every line that is not blank; a wrong one carries its problem.

    Raises:
        ConfigError: the file cannot be read.
    """
    seen: dict[str, int] = {}
    try:
        with Path(file).expanduser().open("rb") as lines:
            for number, raw in enumerate(_raw_lines(lines), 1):
                # Files joined end to end have their byte order marks inside.
                text = raw.removeprefix(codecs.BOM_UTF8)
                if text.strip():
                    yield _checked(_parse(number, text), seen)
    except OSError as error:
        raise ConfigError(f"input {file} cannot be read: {error.strerror or error}") from error


def _raw_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines; of one that is too long, its first MAX_LINE + 1 bytes."""
    while raw := file.readline(MAX_LINE + 1):
        part = raw
        while len(part) > MAX_LINE and not part.endswith(b"\n"):
            part = file.readline(MAX_LINE + 1)
        yield raw


def _checked(line: BatchLine, seen: dict[str, int]) -> BatchLine:
    if line.custom_id is None:
        return line
    first = seen.setdefault(line.custom_id, line.number)
    if first == line.number:
        return line
    return BatchLine(
        line.number, line.custom_id, problem=f"custom_id is that of line {first}; make it unique"
    )


def _parse(number: int, raw: bytes) -> BatchLine:
    name: str | None = None
    try:
        entry, twice = _read_object(raw)
        name = _name_of(entry)
        if twice:
            raise ValueError(f"the field {_shown(twice[0])} is given twice in one object")
        return BatchLine(number, name, _url_of(entry), _body_of(entry))
    except UnicodeError as error:
        problem = _not_unicode(raw, error)
    except RecursionError:
        problem = "the line is nested too deeply"
    except ValueError as error:
        problem = str(error)
    return BatchLine(number, name, problem=problem)


def _read_object(raw: bytes) -> tuple[dict[str, Any], list[str]]:
    """Return a line's object, and the names of fields that are given twice."""
    twice: list[str] = []

    def note_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice.append(counts.most_common(1)[0][0])
        return fields

    if len(raw) > MAX_LINE:
        raise ValueError(f"the line has more than {MAX_LINE} bytes")
    try:
        # Bytes that are not UTF-8 stay marked as such until the line's name is known.
        text = raw.decode("utf-8", "surrogateescape")
        entry = json.loads(text, object_pairs_hook=note_twice)
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError("a number of the line has too many digits to be read") from error
    if not isinstance(entry, dict):
        raise ValueError(f"the line is {json_type(entry)}; it must be a JSON object")
    return entry, twice


def _name_of(entry: dict[str, Any]) -> str:
    name = entry.get("custom_id")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID:
        raise ValueError(
            f"custom_id is {_shown(name)}; it must be a text of 1 to {MAX_ID} characters"
        )
    name.encode()
    return name


def _url_of(entry: dict[str, Any]) -> str:
    method, url = entry.get("method", "POST"), entry.get("url")
    if method != "POST":
        raise ValueError(f"method is {_shown(method)}; it must be POST")
    if not isinstance(url, str) or not ROUTE.fullmatch(url):
        raise ValueError(f"url is {_shown(url)}; it must be a route such as /v1/chat/completions")
    return url


def _body_of(entry: dict[str, Any]) -> bytes:
    body = entry.get("body")
    if not isinstance(body, dict):
        raise ValueError(f"body is {_shown(body)}; it must be a JSON object")
    for name in ("stream", "background"):
        if body.get(name):
            raise ValueError(f"{name} is true; a batch has whole answers only")
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeError:
        raise
    except ValueError as error:  # NaN, or a number beyond what a float can be
        raise ValueError(f"body cannot be sent: {error}") from error


def _not_unicode(raw: bytes, error: UnicodeError) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        return f"the line is not UTF-8: byte {wrong.start} is 0x{raw[wrong.start]:02x}"
    half = error.object[error.start] if isinstance(error, UnicodeEncodeError) else ""
    return f"the line holds {half!a}, one half of a character (a lone surrogate)"


def _shown(value: Any) -> str:
    """Show a value in a message: a text by its start, others by their kind."""
    return ascii(value[:MAX_SHOWN]) if isinstance(value, str) else json_type(value)


class BatchOutput:
    """The file of answers: line n answers the n-th line of the input that is not blank.

    Args:
        file: where it is; what it holds already is kept, but for a last line cut short.

    Attributes:
        done: names answered by lines that are there already, in order.
    """

    def __init__(self, file: str) -> None:
        self._path = Path(file).expanduser()
        self.done: list[str | None] = []
        try:
            self._resume()
            # A half of a character in an answer is written as JSON's escape for it.
            self._handle = self._path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigError(
                f"output {file} cannot be written: {error.strerror or error}"
            ) from error

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *exc: object) -> None:
        self._handle.close()

    def check(self, lines: Iterator[BatchLine]) -> int:
        """Hold the answers that are there against the lines they should belong to.

        Returns:
            How many lines there are.

        Raises:
            ConfigError: an answer belongs to something else.
        """
        names = [line.custom_id for line in lines]
        for place, name in enumerate(self.done):
            asked = names[place] if place < len(names) else "no such line"
            if name != asked:
                raise ConfigError(
                    f"output {self._path}, line {place + 1}, answers {name!r}, but the input has "
                    f"{asked!r} there; remove the file or name another"
                )
        return len(names)

    def write(self, answer: dict[str, Any]) -> None:
        """Append one answer."""
        self._handle.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._handle.flush()

    def _resume(self) -> None:
        if not self._path.exists():
            return
        whole = 0
        with self._path.open("rb") as lines:
            for raw in lines:
                if not raw.endswith(b"\n"):
                    break
                self.done.append(_custom_id(raw, self._path))
                whole += len(raw)
        if whole < self._path.stat().st_size:  # a line cut short by a crash is written anew
            os.truncate(self._path, whole)


def _custom_id(raw: bytes, path: Path) -> str | None:
    try:
        name = json.loads(raw)["custom_id"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"output {path} holds a line that is not an answer of a batch: {raw[:60]!r}; remove "
            "the file or name another"
        ) from error
    return None if name is None else str(name)
