"""Chat templates: messages to one prompt string, in Jinja's sandbox.

Templates are part of a model, so they are untrusted code: they run in jinja2's immutable sandbox,
without file access, and see only the messages and named special tokens. The environment is the one
that transformers gives them (`tests/conformance/` compares the two).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from girih.kernels.base.errors import RequestError, SourceError
from girih.serve.text.chat_messages import Arguments, damaged_calls, plain_message, with_arguments

if TYPE_CHECKING:
    from jinja2 import Environment, Template

logger = logging.getLogger("girih.serve")

DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names that a model's templates may have."""
OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands behind a message that is continued; transformers' word, so that templates see the same."""
PROBE = "GIRIH_ARGUMENTS"
"""Arguments that tell whether a template shows a text as it is."""


@dataclass(frozen=True)
class ChatTemplate:
    """One template (compiled on first use).

    Attributes:
        source: its text.
    """

    source: str

    def render(
        self,
        messages: list[dict[str, Any]],
        special_tokens: dict[str, str],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the prompt.

        Args:
            messages: dicts with at least "role" and "content".
            special_tokens: named tokens the template may use.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: leave the last message open so that the model continues it.
            variables: further names for the template.

        Raises:
            RequestError: the template refuses the messages, or fails on them.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true; choose one",
                param="continue_final_message",
            )
        plain = [plain_message(message, index) for index, message in enumerate(messages)]
        if "developer" not in self.source:  # the newer name of the same role
            plain = [{**m, "role": "system"} if m["role"] == "developer" else m for m in plain]
        names = {**special_tokens, "tools": None, "documents": None, **variables}
        names["add_generation_prompt"] = add_generation_prompt
        if not continue_final_message:
            return self._with_calls(plain, names)
        if not plain:
            raise RequestError(
                "continue_final_message needs a last message", param="continue_final_message"
            )
        *before, last = plain
        opened = {**last, "content": last["content"] + OPEN_END}
        return _cut_open(self._with_calls([*before, opened], names), last["content"])

    def _with_calls(self, messages: list[dict[str, Any]], names: dict[str, Any]) -> str:
        """Give arguments of calls as maps; as text to a template that takes no maps.

        Damaged ones are text where the template shows a text as it is, an empty map elsewhere.
        """

        def fill(read: Callable[[Arguments], Arguments]) -> str:
            return self._fill(with_arguments(messages, read), names)

        places = damaged_calls(messages)
        for place in places:
            logger.warning("%s is not a JSON object; the template may get {} instead", place)
        try:
            text = fill(lambda a: {} if isinstance(a, str) else a)
        except RequestError:
            if any("tool_calls" in message for message in messages):
                with contextlib.suppress(RequestError):
                    return fill(
                        lambda a: a if isinstance(a, str) else json.dumps(a, ensure_ascii=False)
                    )
            raise
        if places:
            with contextlib.suppress(RequestError):
                probed = fill(lambda a: PROBE if isinstance(a, str) else a)
                if PROBE in probed and json.dumps(PROBE) not in probed:
                    return fill(lambda a: a)
        return text

    def _fill(self, messages: list[dict[str, Any]], names: dict[str, Any]) -> str:
        try:
            return _compiled(self.source).render(messages=messages, **names)
        except Exception as error:  # a template is foreign code: whatever it raises is a refusal
            raise RequestError(
                f"the chat template refused these messages: {error}", param="messages"
            ) from error


def load_chat_templates(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, ChatTemplate]:
    """Read the templates of a model directory, by name; the main one is "default".

    Files count before the tokenizer's config, all of whose templates a main file replaces.

    Raises:
        SourceError: a file cannot be read.
    """
    files = {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    main = path / "chat_template.jinja"
    declared = tokenizer_config.get("chat_template")
    if main.exists():
        files[DEFAULT], declared = main, None
    entries = declared if isinstance(declared, list) else [{"name": DEFAULT, "template": declared}]
    named = {str(e.get("name")): e.get("template") for e in entries if isinstance(e, dict)}
    try:
        named |= {name: file.read_text("utf-8") for name, file in files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"a chat template in {path} could not be read: {error}") from error
    return {name: ChatTemplate(text) for name, text in named.items() if isinstance(text, str)}


def pick_template(
    templates: Mapping[str, ChatTemplate], wanted: str | None, has_tools: bool
) -> ChatTemplate:
    """Return the template for a conversation.

    Args:
        templates: the model's, by name.
        wanted: one of their names, or the text of a template of its own; None looks for one.
        has_tools: tools are given: a template for them is looked for first.

    Raises:
        RequestError: there is none.
    """
    names = ", ".join(sorted(templates))
    if wanted is not None:
        if wanted not in templates and "{" not in wanted:
            raise RequestError(
                f"chat_template is {wanted[:80]!r}; it must be a Jinja template"
                + (f", or one of this model's: {names}" if names else ""),
                param="chat_template",
            )
        return templates.get(wanted) or ChatTemplate(wanted)
    for name in (FOR_TOOLS, DEFAULT) if has_tools else (DEFAULT,):
        if name in templates:
            return templates[name]
    if not templates:
        raise RequestError(
            "this model has no chat template; send the prompt as text to /v1/completions",
            param="messages",
        )
    raise RequestError(
        f"this model has no default chat template; choose one with chat_template: {names}",
        param="chat_template",
    )


def _cut_open(text: str, final: str) -> str:
    """Cut behind the message that is continued, `final`, which `OPEN_END` follows in `text`."""
    place = text.rfind(OPEN_END.rstrip())
    if place < 0 or final.strip() not in text:
        raise RequestError(
            "continue_final_message needs a last message whose text the chat template shows as it "
            "is; this template leaves it out or changes it",
            param="continue_final_message",
        )
    if text.startswith(OPEN_END, place):
        return text[:place]
    return text[:place].rstrip()  # the template strips messages


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@cache
def _environment() -> Environment:
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it shows them."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("show"), [], [], body).set_lineno(line)

        def show(self, caller: Callable[[], str]) -> str:
            return caller()

    class Names(Namespace):
        """A namespace without private names, which would lead out of the sandbox."""

        def __init__(*args: Any, **names: Any) -> None:  # so that a name may be "self"
            itself, *maps = args
            Namespace.__init__(itself)
            for name, value in dict(*maps, **names).items():
                itself[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"the name {name!r} begins with an underscore")
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": Names,
        "dict": _Maps(),
    }
    return environment


class _Maps:
    """`dict` for templates: what it makes, without the class itself."""

    def __call__(self, *maps: Any, **items: Any) -> dict[Any, Any]:
        return dict(*maps, **items)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a model should not see.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
