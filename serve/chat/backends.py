"""Who answers: an engine in this process, or a server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from girih.kernels.errors import EngineError, RequestError
from girih.serve.chat.conversation import Message
from girih.serve.chat.settings import Settings
from girih.serve.sampling_defaults import SamplingDefaults, read_generation_config
from girih.serve.sse import sse_events, sse_lines

if TYPE_CHECKING:
    from girih.serve.llm import LLM


@dataclass(frozen=True)
class Piece:
    """Part of an answer.

    Attributes:
        text: what to show.
        num_tokens: tokens behind it; of a server that only tells in the end, all in the last piece.
        is_thought: reasoning that precedes the answer.
        finish_reason: why the answer ended, in the last piece.
    """

    text: str
    num_tokens: int = 0
    is_thought: bool = False
    finish_reason: str | None = None


class ChatBackend(Protocol):
    """Answers conversations.

    Attributes:
        title: the model's name and where it runs.
        may_be_interrupted: whether KeyboardInterrupt at any point leaves it usable.
    """

    title: str
    may_be_interrupted: bool

    def answer(self, messages: list[Message], settings: Settings) -> Iterator[Piece]:
        """Yield the answer; closing the iterator stops it.

        Raises:
            GirihError: it cannot be answered.
        """

    def close(self) -> None:
        """Give back what it holds."""


class LocalBackend:
    """An engine in this process."""

    may_be_interrupted = False  # a step must end before the core can forget its request

    def __init__(self, llm: LLM) -> None:
        self.title = f"{llm.handle.name} in this process"
        self._llm = llm
        self._model_values = read_generation_config(llm.handle.model_path)

    def answer(self, messages: list[Message], settings: Settings) -> Iterator[Piece]:
        """Yield the answer."""
        prompt = self._llm.render_chat(messages)
        defaults = SamplingDefaults(self._model_values, settings.sampling)
        params = defaults.build({}, max_tokens=None)
        for delta in self._llm.stream(prompt, params):
            yield Piece(delta.text, len(delta.token_ids), finish_reason=delta.finish_reason)

    def close(self) -> None:
        """Nothing to give back: the engine ends with the process."""


class RemoteBackend:
    """A server with OpenAI's chat route.

    Args:
        url: its address, with or without /v1.
        model: name of the model; None asks the server.
        api_key: shown as a bearer token; None takes $OPENAI_API_KEY when it is set.

    Raises:
        EngineError: the server cannot be reached or does not list its models.
    """

    may_be_interrupted = True

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        root = url.rstrip("/").removesuffix("/v1")
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self._http = httpx.Client(
            base_url=root,
            headers={
                "content-type": "application/json",
                **({"authorization": f"Bearer {key}"} if key else {}),
            },
            timeout=httpx.Timeout(600.0, connect=10.0),
        )
        try:
            self._model = model or self._ask_model(root)
        except BaseException:
            self.close()
            raise
        self.title = f"{self._model} at {root}"

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _ask_model(self, root: str) -> str:
        try:
            answer = self._http.get("/v1/models")
        except (httpx.TransportError, httpx.UnsupportedProtocol) as error:
            raise EngineError(f"no server answers at {root}: {error}") from error
        if answer.status_code != 200:
            raise EngineError(f"{root} does not list its models: {_message(answer)}")
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineError(
                f"{root} does not list its models; name one with url_model=NAME"
            ) from error

    def answer(self, messages: list[Message], settings: Settings) -> Iterator[Piece]:
        """Yield the answer."""
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings.changed(),
        }
        try:
            content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise RequestError(f"this cannot be sent as JSON: {error}") from error
        try:
            with self._http.stream("POST", "/v1/chat/completions", content=content) as response:
                if response.status_code != 200:
                    response.read()
                    raise RequestError(_message(response))
                for event in sse_events(sse_lines(response.iter_text())):
                    yield from _read_event(event)
        except httpx.HTTPError as error:
            raise EngineError(f"the connection failed: {error or type(error).__name__}") from error


def _read_event(event: dict[str, Any]) -> Iterator[Piece]:
    if "error" in event:
        raise EngineError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", []):
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought:
            yield Piece(thought, is_thought=True)
        yield Piece(delta.get("content") or "", finish_reason=choice.get("finish_reason"))
    if event.get("usage"):
        yield Piece("", event["usage"].get("completion_tokens") or 0)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.text[:200]}"
