"""Grammars (Lark) of whole outputs: reasoning, then calls in a model's own format or an answer.

A format's part is a function that adds rules to a `Writer` and returns an expression for one call
without the marker that opens it; `CALLS` says how several are put together. `free` is for outputs
that may have calls: text, and calls from where the model begins one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from girih.runtime.structured.lark import lark_escaped, quoted
from girih.serve.text.parsers import (
    deepseek,
    gemma,
    harmony,
    hermes,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from girih.serve.text.parsers.grammar_writer import ANY, Tool, Writer, listed
from girih.serve.text.parsers.registry import ReasoningFormat
from girih.serve.text.parsers.text_values import is_text, patterns_of

SPACE = "[ \\t\\r\\n]*"


def _json_call(writer: Writer, tool: Tool, key: str) -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    return f"{quoted(head)} {writer.json(tool.schema)} {quoted('}')}"


def _hermes(writer: Writer, tool: Tool) -> str:
    call = _json_call(writer, tool, "arguments")
    return f"{quoted(chr(10))} {call} {quoted(chr(10))} {writer.text(hermes.END)}"


def _llama3(writer: Writer, tool: Tool) -> str:
    return _json_call(writer, tool, "parameters")


def _mistral(writer: Writer, tool: Tool) -> str:
    if mistral.ARGUMENTS not in writer.template:
        return _json_call(writer, tool, "arguments")
    return f"{quoted(tool.name)} {writer.text(mistral.ARGUMENTS)} {writer.json(tool.schema)}"


def _deepseek(writer: Writer, tool: Tool) -> str:
    middle, arguments = writer.text(deepseek.SEPARATOR), writer.json(tool.schema)
    end = writer.text(deepseek.CALL_END)
    if deepseek.FENCE not in writer.template:
        return f"{quoted(tool.name)} {middle} {arguments} {end}"
    head = quoted(f"{tool.name}\n```json\n")
    return f'"function" {middle} {head} {arguments} {quoted(chr(10) + "```")} {end}'


def _harmony(writer: Writer, tool: Tool) -> str:
    to = quoted(f"commentary to=functions.{tool.name} ")
    constrain, message = writer.text(harmony.CONSTRAIN), writer.text(harmony.MESSAGE)
    return f'{to} {constrain} "json" {message} {writer.json(tool.schema)}'


def _properties(tool: Tool) -> list[tuple[str, Any, bool]]:
    """(name, schema, whether it is required) of each argument, definitions included."""
    shared = {k: tool.schema[k] for k in ("$defs", "definitions") if k in tool.schema}
    required = tool.schema.get("required", ())
    return [
        (name, {**shared, **part} if isinstance(part, dict) else part, name in required)
        for name, part in tool.schema.get("properties", {}).items()
    ]


def _pythonic(writer: Writer, tool: Tool) -> str:
    items = [
        (f"{quoted(name + '=')} {writer.json(part)}", must)
        for name, part, must in _properties(tool)
    ]
    return f"{quoted(tool.name + '(')} {listed(items, quoted(', '))} {quoted(')')}"


def _coder(writer: Writer, tool: Tool) -> str:
    head = quoted(f"\n{qwen3_coder.FUNCTION}")
    return f'{head} {_coder_function(writer, tool)} "\\n" {writer.text(qwen3_coder.END)}'


def _coder_function(writer: Writer, tool: Tool) -> str:
    """Expression for a call after `<function=`."""
    head = quoted(f"{tool.name}>\n")
    return " ".join([head, *_parameters(writer, tool), quoted(qwen3_coder.FUNCTION_END)])


def _parameters(writer: Writer, tool: Tool) -> list[str]:
    items = []
    end = f"\n{qwen3_coder.PARAMETER_END}"
    for name, part, must in _properties(tool):
        if is_text(part):
            bars = [f"{ANY}{lark_escaped(qwen3_coder.PARAMETER_END)}(.|\\n)+"]
            value = writer.until(end, patterns_of(part), bars)
        else:
            value = f"{writer.json(part)} {quoted(end)}"
        item = f'({quoted(f"<parameter={name}>{chr(10)}")} {value} "\\n")'
        items.append(item if must else f"{item}?")
    return items


def _gemma_of(marks: gemma.Marks) -> Callable[[Writer, Tool], str]:
    def call(writer: Writer, tool: Tool) -> str:
        items = []
        for name, part, must in _properties(tool):
            value = _quoted_text(writer, part, marks) if is_text(part) else writer.json(part)
            items.append((f"{quoted(name + ':')} {value}", must))
        head = quoted(f"{gemma.PREFIX}{tool.name}{{")
        return f"{head} {listed(items, quoted(','))} {quoted('}')} {writer.text(marks.end)}"

    return call


def _quoted_text(writer: Writer, schema: dict[str, Any], marks: gemma.Marks) -> str:
    text = f"{writer.text(marks.quote)} {writer.until(marks.quote, patterns_of(schema))}"
    return f'({text} | "null")' if "null" in schema["type"] else f"({text})"


@dataclass(frozen=True)
class CallGrammar:
    """The grammar of calls: how one is written, and how several are joined.

    Attributes:
        call: expression for one call of a tool, after `opening`.
        opening: marker before each call.
        separator: text between two calls; None where there can be one only.
        start: marker before the first.
        bracket: text after `start`.
        end: marker after the last.
        bare: a marker that begins a call as well, and the call after it.
        alone: regular expression for how an answer begins that is nothing but calls; "" where calls
            have markers and may follow text.
        tag: marker that may come before `alone`.
    """

    call: Callable[[Writer, Tool], str]
    opening: str = ""
    separator: str | None = ""
    start: str = ""
    bracket: str = ""
    end: str = ""
    bare: tuple[str, Callable[[Writer, Tool], str]] | None = None
    alone: str = ""
    tag: str = ""


CALLS: dict[str, CallGrammar] = {
    "hermes": CallGrammar(_hermes, hermes.START, "\n"),
    "qwen3_coder": CallGrammar(
        _coder, qwen3_coder.START, "\n", bare=(qwen3_coder.FUNCTION, _coder_function)
    ),
    "llama3_json": CallGrammar(_llama3, "", "; ", alone=r"\{", tag=llama3_json.TAG),
    "json_list": CallGrammar(_llama3, "", ", ", bracket="[", end="]", alone=rf"(\[{SPACE})?\{{"),
    "mistral": CallGrammar(_mistral, mistral.START),
    "deepseek_v3": CallGrammar(
        _deepseek,
        deepseek.CALL,
        "\n",
        deepseek.CALLS,
        end=deepseek.CALLS_END,
        bare=(deepseek.CALL, _deepseek),
    ),
    "gpt_oss": CallGrammar(_harmony, harmony.CHANNEL, None),
    "pythonic": CallGrammar(
        _pythonic, "", ", ", bracket="[", end="]", alone=r"\[", tag=pythonic.START
    ),
    "functiongemma": CallGrammar(_gemma_of(gemma.FUNCTION_GEMMA), gemma.FUNCTION_GEMMA.start),
    "gemma4": CallGrammar(_gemma_of(gemma.GEMMA4), gemma.GEMMA4.start),
}
_MISTRAL_LIST = CallGrammar(_mistral, "", ", ", mistral.START, "[", "]")


def _of_template(name: str, writer: Writer) -> CallGrammar:
    is_list = name == "mistral" and mistral.ARGUMENTS not in writer.template
    return _MISTRAL_LIST if is_list else CALLS[name]


def calls(writer: Writer, name: str, tools: Sequence[Tool], allow_many: bool) -> str:
    """Expression for one or more calls in the format `name`."""
    grammar = _of_template(name, writer)
    first = writer.text(grammar.start or grammar.opening)
    return f"{first} {_opened_calls(writer, grammar, tools, allow_many)}".strip()


def _opened_calls(
    writer: Writer, grammar: CallGrammar, tools: Sequence[Tool], allow_many: bool
) -> str:
    """Expression for calls after their first marker."""
    opening = writer.text(grammar.opening)
    one = writer.pick([grammar.call(writer, tool) for tool in tools])
    many = f"{opening} {one}" if grammar.start else one
    if allow_many and grammar.separator is not None:
        many = f"{many} ({writer.text(grammar.separator)} {opening} {one})*"
    return f"{writer.text(grammar.bracket)} {many} {writer.text(grammar.end)}"


def free(
    writer: Writer,
    name: str,
    tools: Sequence[Tool],
    allow_many: bool,
    reasoning: ReasoningFormat | None = None,
    is_thinking: bool = False,
) -> str:
    """Expression for reasoning, then text in which every call that is begun is one of `tools`.

    Where a format has no marker (`CallGrammar.alone`), an answer that begins like calls is calls.

    Args:
        writer: collects the rules.
        name: the format of calls.
        tools: the functions.
        allow_many: whether text and calls may follow a call.
        reasoning: how reasoning is marked; None when there is none to come.
        is_thinking: whether the prompt has opened it.
    """
    if name == "gpt_oss":
        return _free_messages(writer, tools)
    talk = _Talk(writer, _of_template(name, writer), tools, allow_many)
    if reasoning is None or not reasoning.end:
        return talk.expression()
    start = writer.text(reasoning.start)
    if is_thinking:
        return f"{writer.until(reasoning.end)} {talk.expression()}"
    if reasoning.is_always_first:
        return f"{start}? {writer.until(reasoning.end)} {talk.expression()}"
    if writer.is_control(reasoning.start):
        return f"({start} {writer.until(reasoning.end)} {talk.expression()} | {talk.expression()})"
    opened = f"{SPACE}{lark_escaped(reasoning.start)}{ANY}"
    thoughts = writer.until(reasoning.end, [opened])
    return f"({thoughts} {talk.expression()} | {talk.expression([opened])})"


class _Talk:
    """Text with calls in it, written several times: with and without reasoning before it."""

    def __init__(
        self, writer: Writer, grammar: CallGrammar, tools: Sequence[Tool], allow_many: bool
    ) -> None:
        self._writer = writer
        self._grammar = grammar
        self._allow_many = allow_many
        opened = _opened_calls(writer, grammar, tools, allow_many and self._is_list)
        self._begun = [(grammar.start or grammar.opening, writer.rule(opened))]
        if grammar.bare is not None:
            marker, call = grammar.bare
            self._begun.append((marker, writer.pick([call(writer, tool) for tool in tools])))

    @property
    def _is_list(self) -> bool:
        """True if several calls are one list, with text before it only."""
        return bool(self._grammar.start or self._grammar.alone)

    def expression(self, unless: Sequence[str] = ()) -> str:
        """Expression for text that begins like none of `unless`."""
        return self._alone(unless) if self._grammar.alone else self._marked(unless)

    def _marked(self, unless: Sequence[str]) -> str:
        writer = self._writer
        first = self._one(unless)
        if self._allow_many:
            first = f"{first} {self._one(())}* {writer.anything()}"
        return f"({first} | {writer.anything(unless)})"

    def _one(self, unless: Sequence[str]) -> str:
        until = self._writer.until
        return self._writer.pick([f"{until(m, unless=unless)} {call}" for m, call in self._begun])

    def _alone(self, unless: Sequence[str]) -> str:
        writer, grammar = self._writer, self._grammar
        [(_, calls)] = self._begun
        space = writer.rule(f"/{SPACE[:-1]}{{1,8}}/")
        tag = f"{writer.text(grammar.tag)}?" if grammar.tag else ""
        mark = f"({lark_escaped(grammar.tag)}{SPACE})?" if grammar.tag else ""
        like_calls = f"{SPACE}{mark}{grammar.alone}{ANY}"
        return f"({space}? {tag} {calls} | {writer.anything([*unless, like_calls])})"


def _free_messages(writer: Writer, tools: Sequence[Tool]) -> str:
    channel, message = writer.text(harmony.CHANNEL), writer.text(harmony.MESSAGE)
    before = f"{_message(writer, 'analysis')} {_message(writer, 'commentary')}"
    one = calls(writer, "gpt_oss", tools, False)
    final = f'{channel} "final" {message} {writer.anything()}'
    return f"{before} ({one} | {final})"


def _message(writer: Writer, channel: str) -> str:
    """Expression for a whole message before the answer, which may be left out."""
    head = f"{writer.text(harmony.CHANNEL)} {quoted(channel)} {writer.text(harmony.MESSAGE)}"
    rest = f'{writer.until(harmony.ENDS[0])} {writer.text(harmony.START)} "assistant"'
    return f"({head} {rest})?"


def answer(writer: Writer, reasoning: ReasoningFormat | None) -> str:
    """Expression for the answer `@answer` where the model puts it."""
    if reasoning is not None and reasoning.name == "gpt_oss":
        channel, message = writer.text(harmony.CHANNEL), writer.text(harmony.MESSAGE)
        return f'{channel} "final" {message} @answer'
    return "@answer"


def thoughts(writer: Writer, reasoning: ReasoningFormat | None, is_thinking: bool) -> str:
    """Expression for the reasoning before everything else; "" without."""
    if reasoning is None:
        return ""
    if reasoning.name == "gpt_oss":
        return _message(writer, "analysis")
    if not reasoning.start:
        return ""
    start = writer.text(reasoning.start)
    space = writer.rule("/[ \\n]{1,8}/")
    opened = f"{writer.until(reasoning.end)} {space}?"
    if is_thinking:
        return opened
    return f"{start}? {opened}" if reasoning.is_always_first else f"({start} {opened})?"


def whole(writer: Writer, start: str) -> str:
    """The finished grammar."""
    return "\n".join([f"start: {start}", *writer.lines]) + "\n"
