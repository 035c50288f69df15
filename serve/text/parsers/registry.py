"""Which formats there are, and which one a model's chat template asks for.

Other packages add theirs through the entry-point groups `girih.tool_formats` and
`girih.reasoning_formats`; an entry point names a `ToolFormat` or `ReasoningFormat`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TypeVar

from girih.kernels.base.errors import ConfigError
from girih.serve.text.parsers import (
    deepseek,
    gemma,
    harmony,
    hermes,
    json_list,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
    thinking,
)
from girih.serve.text.parsers.machine import Machine, Run


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        name: for the configuration.
        run: the parser, a generator over a `Machine`.
        signs: a chat template that has all of these writes calls so.
        needs_control_tokens: the markers are control tokens, which text usually leaves out.
    """

    name: str
    run: Callable[[Machine], Run]
    signs: tuple[str, ...] = ()
    needs_control_tokens: bool = False


@dataclass(frozen=True)
class ReasoningFormat:
    """A format of reasoning.

    Attributes:
        name: for the configuration.
        run: reads the reasoning; the tool format goes on where it stops.
        start: marker that opens it ("": the format does everything by itself).
        end: marker that closes it.
        signs: a chat template that has all of these marks it so.
        needs_control_tokens: the markers are control tokens.
        is_always_first: an output that begins without `start` is reasoning too.
    """

    name: str
    run: Callable[[Machine], Run]
    start: str = ""
    end: str = ""
    signs: tuple[str, ...] = ()
    needs_control_tokens: bool = False
    is_always_first: bool = False


Format = TypeVar("Format", ToolFormat, ReasoningFormat)

# In the order in which a template is compared with them: the particular before the general.
TOOL_FORMATS = (
    ToolFormat("gpt_oss", harmony.run, ("<|channel|>", "<|message|>", "functions"), True),
    ToolFormat("deepseek_v3", deepseek.run, (deepseek.CALL,), True),
    ToolFormat(
        "functiongemma", gemma.make_run(gemma.FUNCTION_GEMMA), (gemma.FUNCTION_GEMMA.start,), True
    ),
    ToolFormat("gemma4", gemma.make_run(gemma.GEMMA4), (gemma.GEMMA4.start, "call:"), True),
    ToolFormat("mistral", mistral.run, (mistral.START,), True),
    ToolFormat("qwen3_coder", qwen3_coder.run, ("<function=", "<parameter=")),
    ToolFormat("hermes", hermes.run, (hermes.START,)),
    ToolFormat("pythonic", pythonic.run, (pythonic.START,), True),
    ToolFormat("llama3_json", llama3_json.run, ("parameters", "ipython"), True),
    ToolFormat("json_list", json_list.run),
)
THINK = ("<think>", "</think>")
REASONING_FORMATS = (
    ReasoningFormat(
        "gpt_oss",
        harmony.run,
        signs=("<|channel|>", "<|message|>", "analysis"),
        needs_control_tokens=True,
    ),
    ReasoningFormat(
        "deepseek_r1",
        thinking.make_run(*THINK, is_always_first=True),
        *THINK,
        signs=("</think>", "<｜Assistant｜>"),
        is_always_first=True,
    ),
    ReasoningFormat(
        "qwen3", thinking.make_run(*THINK), *THINK, signs=("</think>", "enable_thinking")
    ),
    ReasoningFormat("think", thinking.make_run(*THINK), *THINK, signs=("</think>",)),
)


@functools.cache
def tool_formats() -> Mapping[str, ToolFormat]:
    """Every tool format by name."""
    return _with_plugins(TOOL_FORMATS, "girih.tool_formats")


@functools.cache
def reasoning_formats() -> Mapping[str, ReasoningFormat]:
    """Every reasoning format by name."""
    return _with_plugins(REASONING_FORMATS, "girih.reasoning_formats")


def _with_plugins(own: tuple[Format, ...], group: str) -> dict[str, Format]:
    entries: list[Format] = [point.load() for point in entry_points(group=group)]
    entries += own
    return {entry.name: entry for entry in entries}


def choose(
    formats: Mapping[str, Format], wanted: str, template: str | None, setting: str
) -> Format | None:
    """The format of a model.

    Args:
        formats: the candidates.
        wanted: a name, "auto" (look at the template) or "none".
        template: the chat template's text.
        setting: the setting that says so, for errors.

    Raises:
        ConfigError: there is no such format.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        if wanted not in formats:
            raise ConfigError(
                f"{setting} is {wanted!r}; it must be auto, none or one of {', '.join(formats)}"
            )
        return formats[wanted]
    for entry in formats.values():
        if template and entry.signs and all(sign in template for sign in entry.signs):
            return entry
    return None
