"""Chat templates: messages to one prompt string, in Jinja's sandbox.

Templates are part of a model, so they are untrusted code: they run in jinja2's immutable sandbox,
without file access, and see only the messages and named special tokens.
"""

from __future__ import annotations

import datetime
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from girih.kernels.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template

TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = ("system", "user", "assistant", "tool", "developer")


class ChatTemplate:
    """One model's template (compiled on first use).

    Args:
        source: the template's text.
        with_tools: the template to use when tools are given; None uses this one.
    """

    def __init__(self, source: str, with_tools: ChatTemplate | None = None) -> None:
        self.source = source
        self.with_tools = with_tools

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
        if self.with_tools is not None and variables.get("tools"):
            return self.with_tools.render(
                messages,
                special_tokens,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true; choose one",
                param="continue_final_message",
            )
        plain = [plain_message(message, index) for index, message in enumerate(messages)]
        if "developer" not in self.source:  # the newer name of the same role
            plain = [{**m, "role": "system"} if m["role"] == "developer" else m for m in plain]
        names = {**special_tokens, "tools": None, "documents": None, **variables}
        try:
            text = self._compiled.render(
                messages=plain, add_generation_prompt=add_generation_prompt, **names
            )
        except Exception as error:  # a template is foreign code: whatever it raises is a refusal
            raise RequestError(
                f"the chat template refused these messages: {error}", param="messages"
            ) from error
        return _cut_after_final(text, plain) if continue_final_message else text

    @cached_property
    def _compiled(self) -> Template:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}` marks the assistant's words for training; here it is a no-op."""

            tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

            def parse(self, parser: Parser) -> list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self.source)


def load_chat_template(path: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate | None:
    """Find the template of a model directory: its own file, else the tokenizer's config."""
    file = path / "chat_template.jinja"
    if file.exists():
        return ChatTemplate(file.read_text("utf-8"))
    declared = tokenizer_config.get("chat_template")
    if isinstance(declared, list):
        named = {entry.get("name"): entry.get("template") for entry in declared}
        tool_use = named.get("tool_use")
        with_tools = ChatTemplate(tool_use) if isinstance(tool_use, str) else None
        default = named.get("default")
        return ChatTemplate(default, with_tools) if isinstance(default, str) else with_tools
    return ChatTemplate(declared) if isinstance(declared, str) else None


def plain_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Check one message, join its text parts into one string, read the arguments of its calls.

    Raises:
        RequestError: unknown role, no content, a part that is not text, or a damaged call.
    """
    where = f"messages[{index}]"
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {str(role)[:80]!r}; it must be one of {', '.join(ROLES)}",
            param="messages",
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part_text(part, where) for part in content)
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise RequestError(
            f"{where}.content is {json_type(content)}; it must be a string or a list of text parts",
            param="messages",
        )
    plain = {**message, "content": content}
    if "reasoning" in message:
        plain.setdefault("reasoning_content", message["reasoning"])
    if message.get("tool_calls"):
        plain["tool_calls"] = _plain_calls(message["tool_calls"], where)
    return plain


def json_type(value: Any) -> str:
    """What JSON calls a value's type."""
    names = {type(None): "null", dict: "an object", list: "a list", bool: "a boolean", str: "text"}
    return names.get(type(value), "a number")


def _plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Clients send arguments as JSON text; templates want them as a map."""
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list", param="messages")
    plain: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}.tool_calls[{number}] has no function with a name", param="messages"
            )
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise RequestError(
                    f"{where}.tool_calls[{number}].function.arguments is not JSON: {error}",
                    param="messages",
                ) from error
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError(
        f"{where}.content has a part of type {str(kind)[:80]!r}; this model takes parts of type "
        "text only",
        param="messages",
    )


def _cut_after_final(text: str, messages: list[dict[str, Any]]) -> str:
    whole = str(messages[-1]["content"]) if messages else ""
    # Templates often strip messages; then the open end has no trailing space either.
    for final in (whole, whole.strip()):
        position = text.rfind(final)
        if final.strip() and position >= 0:
            return text[: position + len(final)]
    raise RequestError(
        "continue_final_message needs a last message whose text the chat template shows as it is",
        param="continue_final_message",
    )


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which a model should not see.
    return json.dumps(value, ensure_ascii=options.get("ensure_ascii", False), indent=indent)


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
