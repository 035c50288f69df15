"""Lines of a batch: reading the requests, and the part of the answers that is there already."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.kernels.errors import ConfigError

MAX_ID = 512


@dataclass(frozen=True)
class BatchLine:
    """One line of the input.

    Attributes:
        number: its line number, from 1.
        custom_id: the caller's name for it; None when the line has none.
        url: the route, e.g. /v1/chat/completions.
        body: what is sent.
        problem: why it cannot be sent, or None.
    """

    number: int
    custom_id: str | None
    url: str = ""
    body: dict[str, Any] | None = None
    problem: str | None = None


def read_lines(file: str) -> Iterator[BatchLine]:
    """Yield every line that is not blank; a wrong one carries its problem.

    Raises:
        ConfigError: the file cannot be read.
    """
    seen: dict[str, int] = {}
    try:
        with Path(file).expanduser().open(encoding="utf-8", errors="replace") as lines:
            for number, text in enumerate(lines, 1):
                if text.strip():
                    yield _checked(_parse(number, text), seen)
    except OSError as error:
        raise ConfigError(f"input {file} cannot be read: {error.strerror or error}") from error


def _checked(line: BatchLine, seen: dict[str, int]) -> BatchLine:
    if line.custom_id is None:
        return line
    first = seen.setdefault(line.custom_id, line.number)
    if first == line.number:
        return line
    return BatchLine(
        line.number, line.custom_id, problem=f"custom_id is that of line {first}; make it unique"
    )


def _parse(number: int, text: str) -> BatchLine:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BatchLine(number, None, problem=f"the line is not JSON: {error}")
    if not isinstance(entry, dict):
        return BatchLine(number, None, problem="the line is not a JSON object")
    name = entry.get("custom_id")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID:
        problem = f"custom_id must be a text of 1 to {MAX_ID} characters"
        return BatchLine(number, None, problem=problem)
    refusal = _problem(entry)
    if refusal is not None:
        return BatchLine(number, name, problem=refusal)
    return BatchLine(number, name, entry["url"], entry["body"])


def _problem(entry: dict[str, Any]) -> str | None:
    url, body = entry.get("url"), entry.get("body")
    if entry.get("method", "POST") != "POST":
        return f"method is {str(entry['method'])[:20]!r}; it must be POST"
    if not isinstance(url, str) or not url.startswith("/"):
        return f"url is {str(url)[:80]!r}; it must be a route such as /v1/chat/completions"
    if not isinstance(body, dict):
        return "body must be a JSON object"
    if body.get("stream"):
        return "stream is true; a batch has whole answers only"
    return None


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
            self._handle = self._path.open("a", encoding="utf-8")
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
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"output {path} holds a line that is not an answer of a batch: {raw[:60]!r}; remove "
            "the file or name another"
        ) from error
    return None if name is None else str(name)
