"""Who answers: an engine in this process, or a server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from girih.kernels.base.errors import EngineError, RequestError
from girih.serve.address import server_root
from girih.serve.chat.conversation import Message
from girih.serve.chat.settings import Settings
from girih.serve.sse import sse_events, sse_lines
from girih.serve.text.sampling_defaults import SamplingDefaults, read_generation_config
from girih.serve.text.texts import does_not, require_task

if TYPE_CHECKING:
    from girih.serve.offline.llm import LLM


COMPLETION_TOKENS = 128


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
        continues: the model has no chat template: messages are pieces of one text, which it
            writes on.
        may_be_interrupted: whether KeyboardInterrupt at any point leaves it usable.
    """

    title: str
    continues: bool
    may_be_interrupted: bool

    def answer(self, messages: list[Message], settings: Settings) -> Iterator[Piece]:
        """Yield the answer; closing the iterator stops it.

        Raises:
            GirihError: it cannot be answered.
        """

    def close(self) -> None:
        """Give back what it holds."""


class LocalBackend:
    """An engine in this process.

    Raises:
        RequestError: its model does not generate.
    """

    may_be_interrupted = False  # a step must end before the core can forget its request

    def __init__(self, llm: LLM) -> None:
        require_task(llm.facts, ("generate",))
        self.continues = not llm.tokenizer.chat_templates
        self._llm = llm
        self._model_values = read_generation_config(Path(llm.facts.model_path))
        sampling = SamplingDefaults(self._model_values).as_text()
        self.title = f"{llm.facts.name} in this process{sampling and f' ({sampling})'}"

    def answer(self, messages: list[Message], settings: Settings) -> Iterator[Piece]:
        """Yield the answer."""
        prompt = as_text(messages) if self.continues else self._llm.render_chat(messages)
        defaults = SamplingDefaults(self._model_values, settings.sampling)
        params = defaults.build({}, max_tokens=longest_answer(self, settings))
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
        ConfigError: no server can have this address.
        EngineError: the server cannot be reached or does not list its models.
        RequestError: its model does not generate.
    """

    may_be_interrupted = True

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        root = server_root("url", url)
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
            card = self._find_card(root, model)
            if card.get("task") in ("embed", "classify"):
                raise RequestError(does_not(("generate",), card["task"], card["id"]))
        except BaseException:
            self.close()
            raise
        self._model = str(card["id"])
        self.continues = card.get("has_chat_template") is False
        self.title = f"{self._model} at {root}"

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _find_card(self, root: str, model: str | None) -> dict[str, Any]:
        """Return what the server says of the model; of one it does not list, its name."""
        try:
            answer = self._http.get("/v1/models")
        except (httpx.TransportError, httpx.UnsupportedProtocol) as error:
            raise EngineError(f"no server answers at {root}: {error}") from error
        try:
            cards = {str(card["id"]): card for card in answer.json()["data"]}
        except (ValueError, KeyError, TypeError):
            cards = {}
        if model is not None:
            return dict(cards.get(model, {"id": model}))
        if answer.status_code != 200:
            raise EngineError(f"{root} does not list its models: {_message(answer)}")
        if not cards:
            raise EngineError(f"{root} does not list its models; name one with url_model=NAME")
        return dict(next(iter(cards.values())))

    def answer(self, messages: list[Message], settings: Settings) -> Iterator[Piece]:
        """Yield the answer."""
        body: dict[str, Any] = {"model": self._model, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **settings.changed()}
        if self.continues:
            path = "/v1/completions"
            body |= {"prompt": as_text(messages), "max_tokens": longest_answer(self, settings)}
        else:
            path = "/v1/chat/completions"
            body["messages"] = messages
        try:
            content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise RequestError(f"this cannot be sent as JSON: {error}") from error
        try:
            with self._http.stream("POST", path, content=content) as response:
                if response.status_code != 200:
                    response.read()
                    raise RequestError(_message(response))
                for event in sse_events(sse_lines(response.iter_text())):
                    yield from _read_event(event)
        except httpx.HTTPError as error:
            raise EngineError(f"the connection failed: {error or type(error).__name__}") from error


def as_text(messages: list[Message]) -> str:
    """Return the text that messages are pieces of."""
    return "".join(str(message["content"]) for message in messages)


def longest_answer(backend: ChatBackend, settings: Settings) -> int | None:
    """Return the most tokens of an answer; None for what the context holds.

    A model that only continues rarely ends by itself.
    """
    limit = settings.sampling.max_tokens
    return COMPLETION_TOKENS if limit is None and backend.continues else limit


def _read_event(event: dict[str, Any]) -> Iterator[Piece]:
    if "error" in event:
        raise EngineError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", []):
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought:
            yield Piece(thought, is_thought=True)
        text = delta.get("content") or choice.get("text") or ""
        yield Piece(text, finish_reason=choice.get("finish_reason"))
    if event.get("usage"):
        yield Piece("", event["usage"].get("completion_tokens") or 0)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.text[:200]}"
