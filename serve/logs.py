"""Log lines on stderr, as text or as JSON, with the id of the request they belong to.

text  2026-01-01 12:00:00,000 girih.access INFO [REQUEST ID] 127.0.0.1 POST /v1/completions 200
json  {"time": …, "level": "info", "logger": "girih.access", "request_id": …, "message": …}
"""

from __future__ import annotations

import contextvars
import logging
import sys
from dataclasses import dataclass

import msgspec

request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
"""The request that the running task serves."""


@dataclass(frozen=True)
class LogSettings:
    """Settings of logging; may be handed to other processes.

    Attributes:
        level: the least important level to show, e.g. "INFO".
        style: "text" or "json".
    """

    level: str = "INFO"
    style: str = "text"

    def apply(self) -> None:
        """Set up the root logger of this process."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter() if self.style == "json" else TextFormatter())
        logging.basicConfig(level=self.level, handlers=[handler], force=True)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


class TextFormatter(logging.Formatter):
    """One line per record, the request id in brackets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line (and the traceback, if there is one)."""
        name = _request_of(record)
        self._style._fmt = (
            "%(asctime)s %(name)s %(levelname)s "
            + (f"[{name.replace('%', '%%')}] " if name else "")
            + "%(message)s"
        )
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object; a traceback is its field `error`."""
        body = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        name = _request_of(record)
        if name:
            body["request_id"] = name
        if record.exc_info:
            body["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(body).decode()


def _request_of(record: logging.LogRecord) -> str | None:
    """The id given with the record (`extra={"request_id": …}`), or the running task's."""
    named: str | None = getattr(record, "request_id", None)
    return named or request_id.get()
