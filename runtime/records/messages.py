"""Messages between a front end and the engine core, independent of the transport.

    front end ── Command ─▶ core          each request is answered by Admission, Call by Answer
    front end ◀─ Message ── core          Outputs come as steps are digested

Inside one process the records are handed over as they are; between processes `encode` turns each
into msgpack. No torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from girih.kernels.base import errors
from girih.kernels.base.errors import EngineError, GirihError, RequestError
from girih.kernels.base.progress import ProgressEvent
from girih.runtime.isolation import describe
from girih.runtime.records.pooling_params import PoolingFacts
from girih.runtime.records.request import EngineOutput, EngineRequest


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of an engine that a front end needs.

    Attributes:
        name: name to show.
        key: the bundle's key.
        model_path: directory with the tokenizer and generation_config.json.
        max_model_len: longest prompt + output, in tokens.
        vocab_size: token ids are below this.
        eos_token_ids: ids that end an output.
        task: "generate", "embed" or "classify".
        pooling: of a model that does not generate.
    """

    name: str
    key: str
    model_path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    task: str = "generate"
    pooling: PoolingFacts | None = None


# ---- to the core ----


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A front end's first words to a core; answered by `Progress` and `Ready`."""


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    """Take requests in together, before the next step; one `Admission` for each, in order."""

    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Drop requests and free their blocks."""

    request_ids: list[str]


class Call(msgspec.Struct, frozen=True, tag=True):
    """Do something that is no request (see `control.py`).

    Attributes:
        call_id: comes back in the answer.
        method: what.
        arguments: its keyword arguments.
    """

    call_id: int
    method: str
    arguments: dict[str, Any] = {}


Command = Hello | AddRequests | AbortRequests | Call


# ---- from the core ----


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Progress of building (a `ProgressEvent`)."""

    stage: str
    done: int
    total: int | None
    detail: str
    model_path: str = ""

    @classmethod
    def of(cls, event: ProgressEvent) -> Progress:
        """The message of an event."""
        return cls(event.stage, event.done, event.total, event.detail, event.model_path)

    def as_event(self) -> ProgressEvent:
        """The event again."""
        return ProgressEvent(self.stage, self.done, self.total, self.detail, self.model_path)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Requests are taken from now on."""

    facts: EngineFacts


class Admission(msgspec.Struct, frozen=True, tag=True):
    """The answer to a request of `AddRequests`.

    Attributes:
        request_id: whose request.
        refusal: None when it was taken in.
    """

    request_id: str
    refusal: Refusal | None = None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Results of steps for the requests of one front end."""

    outputs: list[EngineOutput]


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Call`: a value, or why there is none."""

    call_id: int
    value: Any = None
    refusal: Refusal | None = None


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A sign of life while nothing else is to be said.

    Attributes:
        step_seconds: how long the running step has taken so far; 0 between steps.
    """

    step_seconds: float


class Died(msgspec.Struct, frozen=True, tag=True):
    """The core's last words."""

    refusal: Refusal


class Refusal(msgspec.Struct, frozen=True):
    """An error on its way to another process.

    Attributes:
        kind: name of its class in `girih.kernels.base.errors`.
        message: its text.
        param: the request field at fault.
        code: its machine-readable word.
    """

    kind: str
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        """Describe an error; one that is not girih's own becomes an `EngineError`."""
        if isinstance(error, GirihError):
            param, code = getattr(error, "param", None), getattr(error, "code", None)
            return cls(type(error).__name__, describe(error), param, code)
        return cls("EngineError", describe(error))

    def as_error(self) -> GirihError:
        """Return an error of the same class and text."""
        kind = getattr(errors, self.kind, EngineError)
        if kind is RequestError:
            return RequestError(self.message, self.param, self.code)
        error: GirihError = kind(self.message)
        return error


Message = Progress | Ready | Admission | Outputs | Answer | Alive | Died

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_message_decoder = msgspec.msgpack.Decoder(Message)


def encode(record: Command | Message) -> bytes:
    """Return a record as msgpack."""
    return _encoder.encode(record)


def decode_command(data: bytes) -> Command:
    """Return the command in `data`.

    Raises:
        Exception: `data` is no command, or a value in it refuses itself (see `refusals_of`).
    """
    command: Command = _command_decoder.decode(data)
    return command


def refusals_of(data: bytes, error: Exception) -> list[Admission | Answer]:
    """The answers to a command that `decode_command` could not read, for whoever waits for them.

    Args:
        data: the command.
        error: what was raised.

    Returns:
        One answer per request or call that `data` names; empty when it names none.
    """
    refusal = Refusal("RequestError", f"the engine cannot read the request: {error}")
    try:
        fields = msgspec.msgpack.decode(data)
        if "call_id" in fields:
            return [Answer(int(fields["call_id"]), refusal=refusal)]
        requests = fields.get("requests", [])
        return [Admission(str(request["request_id"]), refusal) for request in requests]
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return []


def decode_message(data: bytes) -> Message:
    """Return the message in `data`."""
    message: Message = _message_decoder.decode(data)
    return message
