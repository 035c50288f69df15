"""The form of a chat answer: how its text is parsed, and the grammar that enforces it.

tools, tool_choice, response_format ─▶ ChatForm ─▶ parser of each choice
                                                ╰▶ StructuredOutput for the engine
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from girih.kernels.base.errors import RequestError
from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured.backends import check
from girih.runtime.structured.closing import prepare
from girih.serve.http.generation.protocol import ChatCompletionRequest
from girih.serve.text import generic_tools
from girih.serve.text.chat_messages import plain_message
from girih.serve.text.chat_template import ChatTemplate
from girih.serve.text.parsers import grammars
from girih.serve.text.parsers.combine import make_parser
from girih.serve.text.parsers.grammar_writer import Tool, Writer
from girih.serve.text.parsers.machine import Context
from girih.serve.text.parsers.parts import ChatParser, PlainText
from girih.serve.text.parsers.registry import (
    ReasoningFormat,
    ToolFormat,
    choose,
    reasoning_formats,
    tool_formats,
)
from girih.serve.text.tokenizer import Tokenizer

TAIL_TOKENS = 16  # of the prompt, to see whether it ends inside the reasoning
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
FALLBACK = "json_list"  # calls where serve.tool_parser is none, when they are required


@dataclass(frozen=True)
class ChatFormats:
    """The formats of one model's calls and reasoning (None: not known, or not at all).

    Attributes:
        tools: of calls.
        reasoning: of reasoning.
        template: text of the chat template in use.
        is_generic: calls are written as the model is told in words, not as it was trained to.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    template: str
    is_generic: bool = False


def formats_of(template: ChatTemplate, tool_parser: str, reasoning_parser: str) -> ChatFormats:
    """Choose the formats by the configuration, or by the template in use."""
    source = template.source
    is_generic = generic_tools.are_needed(template, tool_parser)
    parser = generic_tools.FORMAT if is_generic else tool_parser
    return ChatFormats(
        choose(tool_formats(), parser, source, "serve.tool_parser"),
        choose(reasoning_formats(), reasoning_parser, source, "serve.reasoning_parser"),
        source,
        is_generic,
    )


class ChatForm:
    """The form of one chat answer.

    Args:
        body: the request.
        tokenizer: the model's.
        formats: how the model writes.

    Raises:
        RequestError: a choice of tools that cannot take effect, or a damaged schema.
    """

    def __init__(
        self, body: ChatCompletionRequest, tokenizer: Tokenizer, formats: ChatFormats
    ) -> None:
        self._tokenizer = tokenizer
        self._template = formats.template
        self._reasoning = formats.reasoning
        self._choice, self._named = _tool_choice(body)
        self._tools = _tools(body) if self._choice != "none" else []
        self._is_strict = bool(self._tools) and any(map(_is_strict, body.tools or ()))
        if formats.is_generic and not body.ignore_eos:  # it ends where a form does
            self._is_strict = bool(self._tools)
        self._format = self._tool_format(formats) if self._tools else None
        # A model that is only told of tools would repeat a call: several are asked for by name.
        many = body.parallel_tool_calls
        self._allow_many = bool(many) if formats.is_generic else many is not False
        self._continued = _continued_text(body)

    @property
    def needs_control_tokens(self) -> bool:
        """True if the text must show control tokens to be read."""
        parts = (self._format, self._reasoning)
        return any(part is not None and part.needs_control_tokens for part in parts)

    @property
    def is_named(self) -> bool:
        """True if one certain function was asked for."""
        return self._named is not None

    def parser_factory(self, prompt: list[int]) -> Callable[[], ChatParser]:
        """Return what makes the parser of one choice."""
        if self._format is None and self._reasoning is None:
            return PlainText
        context = self._context(prompt)
        return lambda: make_parser(self._reasoning, self._format, context)

    def structured(
        self, asked: StructuredOutput | None, prompt: list[int]
    ) -> StructuredOutput | None:
        """Return the form that the engine enforces.

        Args:
            asked: the form that `response_format` and the like ask for.
            prompt: the rendered conversation.

        Raises:
            RequestError: the forms contradict each other.
        """
        is_forced = self._choice == "required" or self.is_named
        if is_forced and asked is not None:
            raise RequestError(
                f"{asked.param} and tool_choice both say what the output must be; choose one",
                param=asked.param,
            )
        if asked is None and not is_forced and not self._is_strict:
            return None
        reasoning = None if self._context(prompt).has_thought else self._reasoning
        if reasoning is None and not self._tools:
            return asked
        writer = Writer(self._control_id, self._template)
        is_thinking = self._is_thinking(prompt)
        if asked is None and not is_forced and self._format is not None:
            name, tools = self._format.name, self._tools
            start = grammars.free(writer, name, tools, self._allow_many, reasoning, is_thinking)
            return StructuredOutput.grammar(grammars.whole(writer, start), param="tools")
        body = []
        if self._format is not None:
            wanted = [tool for tool in self._tools if self._named in (None, tool.name)]
            many = self._allow_many and not self.is_named
            body.append(grammars.calls(writer, self._format.name, wanted, many))
        if asked is not None:
            body.append(grammars.answer(writer, reasoning))
        before = grammars.thoughts(writer, reasoning, is_thinking)
        text = grammars.whole(writer, f"{before} {writer.pick(body)}")
        if asked is not None:
            return msgspec.structs.replace(asked, before=text)
        return StructuredOutput.grammar(text, param="tools")

    def _tool_format(self, formats: ChatFormats) -> ToolFormat:
        known = formats.tools
        if known is not None and known.name in grammars.CALLS:
            return known
        if known is not None and self._choice == "auto":
            if self._is_strict:
                raise RequestError(
                    "a tool has strict true, but there is no grammar for the calls of "
                    f"{known.name!r} (serve.tool_parser); leave strict out, or use tool_choice "
                    "'required' or a named function",
                    param="tools",
                )
            return known
        if self._choice == "auto":
            raise RequestError(
                "tools are given, but this server reads no calls (serve.tool_parser is none); set "
                f"it to auto or one of {', '.join(sorted(tool_formats()))}, or use tool_choice "
                "'required' or a named function",
                param="tools",
            )
        return tool_formats()[FALLBACK]

    def _context(self, prompt: list[int]) -> Context:
        reasoning = self._reasoning
        has_thought = False
        if reasoning is not None and reasoning.end and not self._is_thinking(prompt):
            has_thought = self._tail(prompt).endswith(reasoning.end)
            has_thought |= reasoning.end in self._continued
        return Context(
            tools={tool.name: tool.schema for tool in self._tools},
            is_thinking=self._is_thinking(prompt),
            has_thought=has_thought,
            max_calls=None if self._allow_many else 1,
        )

    def _is_thinking(self, prompt: list[int]) -> bool:
        reasoning = self._reasoning
        if reasoning is None or not reasoning.start:
            return False
        _, opened, rest = self._continued.rpartition(reasoning.start)
        if opened:
            return reasoning.end not in rest
        return self._tail(prompt).endswith(reasoning.start)

    def _tail(self, prompt: list[int]) -> str:
        return self._tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()

    def _control_id(self, text: str) -> int | None:
        token_id = self._tokenizer.token_id(text)
        return token_id if token_id is not None and self._tokenizer.is_special(token_id) else None


def _continued_text(body: ChatCompletionRequest) -> str:
    messages = body.messages or []
    if not body.continue_final_message or not messages:
        return ""
    return str(plain_message(messages[-1], len(messages) - 1)["content"])


def _tool_choice(body: ChatCompletionRequest) -> tuple[str, str | None]:
    """("none", "auto", "required" or "named", the name of the function)."""
    choice = body.tool_choice
    if not body.tools and body.parallel_tool_calls is not None:
        body.ignore("parallel_tool_calls")
    if choice == "auto" and not body.tools:
        body.ignore("tool_choice")
        choice = None
    if choice is None:
        choice = "auto" if body.tools else "none"
    if choice != "none" and not body.tools:
        raise RequestError(
            f"tool_choice is {choice!r}, but no tools are given; add tools or leave it out"[:300],
            param="tool_choice",
        )
    if choice in ("none", "auto", "required"):
        return choice, None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    known = [tool.get("function", {}).get("name") for tool in body.tools or ()]
    if name not in known or not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {str(choice)[:200]!r}; it must be none, auto, required or "
            '{"type": "function", "function": {"name": one of the tools}}',
            param="tool_choice",
        )
    return "named", name


def _is_strict(tool: dict[str, Any]) -> bool:
    return bool(tool["function"].get("strict"))


def _tools(body: ChatCompletionRequest) -> list[Tool]:
    tools = []
    for index, tool in enumerate(body.tools or ()):
        function: dict[str, Any] = tool["function"]
        schema = function.get("parameters") or NO_PARAMETERS
        is_closed = _is_strict(tool)
        place = f"tools[{index}].function.parameters"
        # Calls are part of a Lark grammar, which llguidance alone has.
        form = StructuredOutput.json_schema(
            schema, param=place, is_closed=is_closed, backend="llguidance"
        )
        try:
            check(form)
        except RequestError as error:
            raise RequestError(str(error), param="tools") from error
        prepared = prepare(_of_object(msgspec.json.decode(form.text), place), is_closed)
        tools.append(Tool(function["name"], prepared))
    return tools


def _of_object(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema of arguments, which are an object whatever else the schema lets them be."""
    kind = schema.get("type", "object")
    if kind != "object" and "object" not in kind:
        raise RequestError(
            f"{place} has the type {kind!r}; arguments are an object, so it must be 'object'",
            param="tools",
        )
    return schema if "$ref" in schema else {**schema, "type": "object"}
