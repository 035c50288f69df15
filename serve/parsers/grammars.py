"""Grammars (Lark) of whole outputs: reasoning, then calls in a model's own format or an answer.

A format's part is a function that adds rules to a `Writer` and returns an expression for one call;
`CALLS` says how several are put together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from girih.runtime.structured.tag_grammar import WHITE_SPACE, lark_escaped, quoted, unslashed
from girih.serve.parsers import deepseek, gemma, harmony, hermes, mistral, qwen3_coder
from girih.serve.parsers.registry import ReasoningFormat


@dataclass(frozen=True)
class Tool:
    """A function as the grammar sees it.

    Attributes:
        name: its name.
        schema: JSON schema of its arguments.
    """

    name: str
    schema: dict[str, Any]


class Writer:
    """Collects rules.

    Args:
        control_id: id of a control token by its text, None for anything else.
        template: the model's chat template.
    """

    def __init__(self, control_id: Callable[[str], int | None], template: str = "") -> None:
        self.lines: list[str] = []
        self.template = template
        self._control_id = control_id

    def text(self, text: str) -> str:
        """Expression for fixed text; a control token is itself."""
        token_id = self._control_id(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def rule(self, expression: str) -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def json(self, schema: Any) -> str:
        """Expression for JSON of a schema."""
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        return self.rule(f"%json {json.dumps(schema)}")

    def until(self, end: str) -> str:
        """Expression for any text up to and including the first `end`."""
        token_id = self._control_id(end)
        name = f"r{len(self.lines)}"
        if token_id is None:
            self.lines.append(f"{name}[lazy]: /(.|\\n)*{lark_escaped(end)}/")
            return name
        text = f"T{len(self.lines)}"
        self.lines.append(f"{text}: /(.|\\n)+/")
        return f"({text}? <[{token_id}]>)"

    def pick(self, expressions: Sequence[str]) -> str:
        """Expression for one of several."""
        return self.rule(" | ".join(expressions))


def listed(items: Sequence[tuple[str, bool]], separator: str) -> str:
    """Expression for items in order, of which some may be left out.

    Args:
        items: (expression, whether it must be there).
        separator: expression between two items.

    Returns:
        "" when nothing can be there.
    """
    options: list[str] = []
    for index, (expression, is_required) in enumerate(items):
        rest = [f"({separator} {e})" + ("" if must else "?") for e, must in items[index + 1 :]]
        options.append(" ".join([expression, *rest]))
        if is_required:
            return f"({' | '.join(options)})"
    return f"({' | '.join(options)})?" if options else ""


def _json_call(writer: Writer, tool: Tool, key: str) -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    return f"{quoted(head)} {writer.json(tool.schema)} {quoted('}')}"


def _hermes(writer: Writer, tool: Tool) -> str:
    call = _json_call(writer, tool, "arguments")
    start, end = writer.text(hermes.START), writer.text(hermes.END)
    return f"{start} {quoted(chr(10))} {call} {quoted(chr(10))} {end}"


def _llama3(writer: Writer, tool: Tool) -> str:
    return _json_call(writer, tool, "parameters")


def _mistral(writer: Writer, tool: Tool) -> str:
    if mistral.ARGUMENTS not in writer.template:
        return _json_call(writer, tool, "arguments")
    start, middle = writer.text(mistral.START), writer.text(mistral.ARGUMENTS)
    return f"{start} {quoted(tool.name)} {middle} {writer.json(tool.schema)}"


def _deepseek(writer: Writer, tool: Tool) -> str:
    start, middle = writer.text(deepseek.CALL), writer.text(deepseek.SEPARATOR)
    arguments, end = writer.json(tool.schema), writer.text(deepseek.CALL_END)
    if deepseek.FENCE not in writer.template:
        return f"{start} {quoted(tool.name)} {middle} {arguments} {end}"
    head = quoted(f"{tool.name}\n```json\n")
    return f'{start} "function" {middle} {head} {arguments} {quoted(chr(10) + "```")} {end}'


def _harmony(writer: Writer, tool: Tool) -> str:
    channel, message = writer.text(harmony.CHANNEL), writer.text(harmony.MESSAGE)
    to = quoted(f"commentary to=functions.{tool.name} ")
    constrain = writer.text(harmony.CONSTRAIN)
    return f'{channel} {to} {constrain} "json" {message} {writer.json(tool.schema)}'


def _properties(tool: Tool) -> list[tuple[str, Any, bool]]:
    """(name, schema, whether it is required) of each argument, definitions included."""
    shared = {k: tool.schema[k] for k in ("$defs", "definitions") if k in tool.schema}
    required = tool.schema.get("required", ())
    return [
        (name, {**shared, **part} if isinstance(part, dict) else part, name in required)
        for name, part in tool.schema.get("properties", {}).items()
    ]


def _is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


def _pythonic(writer: Writer, tool: Tool) -> str:
    items = [
        (f"{quoted(name + '=')} {writer.json(part)}", must)
        for name, part, must in _properties(tool)
    ]
    return f"{quoted(tool.name + '(')} {listed(items, quoted(', '))} {quoted(')')}"


def _text(writer: Writer, schema: dict[str, Any], end: str) -> str:
    """Expression for unquoted text of a schema, and the marker after it."""
    pattern = str(schema.get("pattern", ""))
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    if "enum" in schema:
        text = writer.pick([quoted(str(option)) for option in schema["enum"]])
    elif pattern.startswith("^") and pattern.endswith("$"):
        text = writer.rule(f"/{unslashed(pattern[1:-1])}/")
    elif shortest or longest != "":
        text = writer.rule(f"/[^<]{{{shortest},{longest}}}/")  # no marker begins inside
    else:
        return writer.until(end)
    return f"{text} {writer.text(end)}"


def _coder(writer: Writer, tool: Tool) -> str:
    head = quoted(f"\n<function={tool.name}>\n")
    lines = [f"{writer.text(qwen3_coder.START)} {head}"]
    end = f"\n{qwen3_coder.PARAMETER_END}"
    for name, part, must in _properties(tool):
        plain = _is_text(part)
        value = _text(writer, part, end) if plain else f"{writer.json(part)} {quoted(end)}"
        opening = quoted(f"<parameter={name}>\n")
        item = f'({opening} {value} "\\n")'
        lines.append(item if must else f"{item}?")
    lines.append(f"{quoted(qwen3_coder.FUNCTION_END + chr(10))} {writer.text(qwen3_coder.END)}")
    return " ".join(lines)


def _gemma_of(marks: gemma.Marks) -> Callable[[Writer, Tool], str]:
    def call(writer: Writer, tool: Tool) -> str:
        quote = writer.text(marks.quote)
        items = []
        for name, part, must in _properties(tool):
            is_text = _is_text(part)
            value = f"{quote} {_text(writer, part, marks.quote)}" if is_text else writer.json(part)
            items.append((f"{quoted(name + ':')} {value}", must))
        head = f"{writer.text(marks.start)} {quoted(f'call:{tool.name}{{')}"
        return f"{head} {listed(items, quoted(','))} {quoted('}')} {writer.text(marks.end)}"

    return call


@dataclass(frozen=True)
class CallGrammar:
    """How calls are written and put together.

    Attributes:
        call: expression for one call of a tool.
        separator: text between two calls; None where there can be one only.
        start: marker before the first.
        end: marker after the last.
    """

    call: Callable[[Writer, Tool], str]
    separator: str | None = ""
    start: str = ""
    end: str = ""


CALLS: dict[str, CallGrammar] = {
    "hermes": CallGrammar(_hermes, "\n"),
    "qwen3_coder": CallGrammar(_coder, "\n"),
    "llama3_json": CallGrammar(_llama3, "; "),
    "json_list": CallGrammar(_llama3, ", ", "[", "]"),
    "mistral": CallGrammar(_mistral, ", "),
    "deepseek_v3": CallGrammar(_deepseek, "\n", deepseek.CALLS, deepseek.CALLS_END),
    "gpt_oss": CallGrammar(_harmony, None),
    "pythonic": CallGrammar(_pythonic, ", ", "[", "]"),
    "functiongemma": CallGrammar(_gemma_of(gemma.FUNCTION_GEMMA)),
    "gemma4": CallGrammar(_gemma_of(gemma.GEMMA4)),
}


def calls(writer: Writer, name: str, tools: Sequence[Tool], allow_many: bool) -> str:
    """Expression for one or more calls in the format `name`."""
    grammar = CALLS[name]
    start, separator, end = grammar.start, grammar.separator, grammar.end
    if name == "mistral":
        is_list = mistral.ARGUMENTS not in writer.template
        start, separator, end = (mistral.START, ", ", "]") if is_list else ("", "", "")
    one = writer.pick([grammar.call(writer, tool) for tool in tools])
    many = one
    if allow_many and separator is not None:
        between = quoted(separator) if separator else ""
        many = f"{one} ({between} {one})*"
    opening = writer.text(start) if start else ""
    if name == "mistral" and start:
        opening += ' "["'
    return f"{opening} {many} {writer.text(end) if end else ''}".strip()


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
        channel, message = writer.text(harmony.CHANNEL), writer.text(harmony.MESSAGE)
        end = writer.until(harmony.ENDS[0])
        start = writer.text(harmony.START)
        return f'({channel} "analysis" {message} {end} {start} "assistant")?'
    if not reasoning.start:
        return ""
    rest = writer.until(reasoning.end)
    space = writer.rule("/[ \\n]{1,8}/")
    opened = f"{rest} {space}?"
    return opened if is_thinking else f"({writer.text(reasoning.start)} {opened})?"


def whole(writer: Writer, start: str) -> str:
    """The finished grammar."""
    return "\n".join([f"start: {start}", *writer.lines]) + "\n"
