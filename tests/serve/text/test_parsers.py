"""Parsers: what they find, and that the way a text is cut does not matter."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from girih.kernels.base.errors import ConfigError
from girih.serve.text.parsers.combine import make_parser
from girih.serve.text.parsers.machine import Context
from girih.serve.text.parsers.parts import ChatDelta
from girih.serve.text.parsers.registry import choose, reasoning_formats, tool_formats

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "code": {"type": ["string", "null"]},
        },
    },
    "now": {"type": "object"},
}


def parse(pieces, tools=None, reasoning=None, **context):
    numbers = itertools.count()
    fields = {"tools": TOOLS, "make_id": lambda: f"id{next(numbers)}", **context}
    parser = make_parser(
        reasoning_formats()[reasoning] if reasoning else None,
        tool_formats()[tools] if tools else None,
        Context(**fields),
    )
    total = ChatDelta()
    for piece in pieces:
        total.merge(parser.push(piece, []))
    total.merge(parser.finish())
    return total


def calls(delta):
    return [(call.name, json.loads(call.arguments)) for call in delta.tool_calls]


OSLO = ("get_weather", {"city": "Oslo", "days": 2})
NOW = ("now", {})
ESCAPED = ("get_weather", {"city": 'a "b" {c} \\ é\n]', "days": 2})
OSLO_JSON = '{"name": "get_weather", "%s": {"city": "Oslo", "days": 2}}'
NOW_JSON = '{"name": "now", "%s": {}}'
ESCAPED_JSON = json.dumps({"name": ESCAPED[0], "arguments": ESCAPED[1]})

V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Oslo", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
    "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo", '
    '"days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
CODER_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
HARMONY = (
    "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 2}'
)
FUNCTION_GEMMA = (
    "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:2}<end_function_call>"
)
GEMMA4 = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>'

# format, text, content, reasoning, calls
CASES = [
    ("hermes", "Hello there.  \n", "Hello there.  \n", "", []),
    ("hermes", f"<tool_call>\n{OSLO_JSON % 'arguments'}\n</tool_call>", "", "", [OSLO]),
    (
        "hermes",
        f"Let me see.\n<tool_call>\n{OSLO_JSON % 'arguments'}\n</tool_call>\n"
        f"<tool_call>{NOW_JSON % 'arguments'}</tool_call>\n",
        "Let me see.",
        "",
        [OSLO, NOW],
    ),
    ("hermes", f"<tool_call>{ESCAPED_JSON}</tool_call> Done.", "Done.", "", [ESCAPED]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call>', "", "", [NOW]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", "", [NOW]),
    ("hermes", "a <tool_call> b", "a <tool_call> b", "", []),
    ("hermes", '<tool_call>{"x": 1}', '<tool_call>{"x": 1}', "", []),
    ("hermes", "1 < 2 <tool", "1 < 2 <tool", "", []),
    ("hermes", f"a <tool_call>{NOW_JSON % 'arguments'}\n</tool", "a", "", [NOW]),
    ("hermes", f"<tool_call>{NOW_JSON % 'arguments'}\n</tool_call>\n<tool_ca", "", "", [NOW]),
    ("hermes", f"<tool_call>{NOW_JSON % 'arguments'}</tool_call>\n<tools", "<tools", "", [NOW]),
    ("qwen3_coder", CODER, "", "", [OSLO]),
    ("qwen3_coder", f"I look.\n{CODER}\n{CODER_NOW}", "I look.", "", [OSLO, NOW]),
    ("qwen3_coder", CODER.removeprefix("<tool_call>\n"), "", "", [OSLO]),
    ("qwen3_coder", CODER.removesuffix("call>"), "", "", [OSLO]),
    ("qwen3_coder", f"{CODER}\n<func", "", "", [OSLO]),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>1 < 2</parameter>"
        "<parameter=code>null</parameter></function></tool_call>",
        "",
        "",
        [("get_weather", {"city": "1 < 2", "code": None})],
    ),
    ("llama3_json", OSLO_JSON % "parameters", "", "", [OSLO]),
    ("llama3_json", f"<|python_tag|>{OSLO_JSON % 'parameters'}", "", "", [OSLO]),
    (
        "llama3_json",
        f"{OSLO_JSON % 'parameters'}; {NOW_JSON % 'parameters'}",
        "",
        "",
        [OSLO, NOW],
    ),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', "", []),
    ("llama3_json", "{ not JSON", "{ not JSON", "", []),
    ("llama3_json", " A text with {braces}", " A text with {braces}", "", []),
    (
        "json_list",
        f"[{OSLO_JSON % 'parameters'}, {NOW_JSON % 'arguments'}]",
        "",
        "",
        [OSLO, NOW],
    ),
    ("json_list", OSLO_JSON % "arguments", "", "", [OSLO]),
    ("json_list", "[1, 2]", "[1, 2]", "", []),
    (
        "mistral",
        f"[TOOL_CALLS] [{OSLO_JSON % 'arguments'}, {NOW_JSON % 'arguments'}]",
        "",
        "",
        [OSLO, NOW],
    ),
    (
        "mistral",
        'Wait.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 2}[TOOL_CALLS]now[ARGS]{}',
        "Wait.",
        "",
        [OSLO, NOW],
    ),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Oslo", "days": 2}', "", "", [OSLO]),
    ("mistral", "[TOOL", "[TOOL", "", []),
    ("deepseek_v3", f"I look.{V3}", "I look.", "", [OSLO, NOW]),
    ("deepseek_v3", V31, "", "", [OSLO, NOW]),
    ("pythonic", '[get_weather(city="Oslo", days=2), now()]', "", "", [OSLO, NOW]),
    ("pythonic", "[get_weather(city='a \"b\" {c} \\\\ é\\n]', days=2)]", "", "", [ESCAPED]),
    (
        "pythonic",
        "<|python_start|>[get_weather(city='Oslo', code=null, days=[1, {'a': True}])]"
        "<|python_end|>",
        "",
        "",
        [("get_weather", {"city": "Oslo", "code": None, "days": [1, {"a": True}]})],
    ),
    ("pythonic", "[1, 2] are numbers", "[1, 2] are numbers", "", []),
    ("pythonic", "[now(__import__('os'))]", "[now(__import__('os'))]", "", []),
    ("functiongemma", f"Yes. {FUNCTION_GEMMA}", "Yes.", "", [OSLO]),
    ("gemma4", f"{GEMMA4}<|tool_call>call:now{{}}<tool_call|>", "", "", [OSLO, NOW]),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>a, {b}<escape>,days:[1,{x:true}]}"
        "<end_function_call>",
        "",
        "",
        [("get_weather", {"city": "a, {b}", "days": [1, {"x": True}]})],
    ),
    ("functiongemma", "<start_function_call>nothing", "<start_function_call>nothing", "", []),
    ("gpt_oss", HARMONY, "", "I think.", [OSLO]),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi!",
        "Hi!",
        "Hm.",
        [],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_calls_and_content(case, size):
    name, text, content, reasoning, expected = case
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    found = parse(pieces, name)
    assert (found.content, found.reasoning, calls(found)) == (content, reasoning, expected)


THINKING = [
    ("think", {}, "<think>\nHm.\n</think>\n\nHi!", "Hi!", "Hm."),
    ("think", {}, "Hi! <think>", "Hi! <think>", ""),
    ("think", {"is_thinking": True}, "Hm.\n</think>\n\nHi!", "Hi!", "Hm."),
    ("think", {"is_thinking": True}, "<think>Hm.</think>Hi!", "Hi!", "Hm."),
    ("think", {}, "<think>endless", "", "endless"),
    ("qwen3", {"has_thought": True}, "\n\nHi!", "\n\nHi!", ""),
    ("deepseek_r1", {}, "Hm.</think>Hi!", "Hi!", "Hm."),
    ("deepseek_r1", {"has_thought": True}, "Hi!", "Hi!", ""),
]


@pytest.mark.parametrize("case", THINKING)
@pytest.mark.parametrize("size", [1, 4, 10_000])
def test_reasoning(case, size):
    name, context, text, content, reasoning = case
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    found = parse(pieces, None, name, **context)
    assert (found.content, found.reasoning) == (content, reasoning)


def test_calls_after_reasoning():
    text = f"<think>I need <tool_call>.</think>\n<tool_call>{NOW_JSON % 'arguments'}</tool_call>"
    found = parse([text], "hermes", "qwen3")
    assert found.reasoning == "I need <tool_call>."
    assert calls(found) == [NOW]
    assert found.content == ""


def test_no_more_calls_than_wanted():
    text = f"[{OSLO_JSON % 'arguments'}, {NOW_JSON % 'arguments'}]"
    assert calls(parse([text], "json_list", max_calls=1)) == [OSLO]


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000])
def test_a_name_that_nests_without_end_is_no_call(text):
    found = parse([f'<tool_call>{{"name": {text}'], "hermes")
    assert found.tool_calls == []
    assert text in found.content


def test_arguments_stream_as_they_come():
    parser = make_parser(None, tool_formats()["hermes"], Context())
    first = parser.push('<tool_call>{"name": "f", "arguments": {"text": "one', [])
    second = parser.push(' two"}}', [])
    assert first.tool_calls[0].name == "f"
    assert first.tool_calls[0].arguments == '{"text": "one'
    assert (second.tool_calls[0].name, second.tool_calls[0].arguments) == (None, ' two"}')


PARTS = [
    *(case[1] for case in CASES),
    *[
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "<parameter=",
        "[TOOL_CALLS]",
        ">",
        "=",
    ],
    *[
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "```",
        ":",
        ",",
        "é",
        "call:f{",
        "<escape>",
        "now(",
    ],
    "text ",
    "\n",
    '{"name": "now"',
    '"arguments": ',
    "<｜tool▁sep｜>",
]


@given(
    st.lists(st.sampled_from(PARTS), max_size=6).map("".join),
    st.lists(st.integers(1, 12), min_size=1, max_size=40),
    st.sampled_from(sorted(tool_formats())),
    st.sampled_from([None, *sorted(reasoning_formats())]),
    st.booleans(),
)
@example("x<tool_call>{", [1], "hermes", "think", True)
def test_any_split_gives_the_same(text, sizes, tools, reasoning, is_thinking):
    whole = parse([text], tools, reasoning, is_thinking=is_thinking)
    pieces, place = [], 0
    for size in itertools.cycle(sizes):
        if place >= len(text):
            break
        pieces.append(text[place : place + size])
        place += size
    assert parse(pieces, tools, reasoning, is_thinking=is_thinking) == whole


@given(st.text(max_size=60), st.sampled_from(sorted(tool_formats())))
def test_plain_text_is_content(text, tools):
    if not any(mark in text for mark in "<[{"):
        assert parse([text], tools) == ChatDelta(content=text)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("... <tool_call> ... enable_thinking ... </think>", "hermes", "qwen3"),
        ("<tool_call><function=x><parameter=y>", "qwen3_coder", None),
        ("[TOOL_CALLS]", "mistral", None),
        ("<｜tool▁call▁begin｜> <｜Assistant｜> </think>", "deepseek_v3", "deepseek_r1"),
        ("<|channel|>analysis<|message|> namespace functions", "gpt_oss", "gpt_oss"),
        ('{"name": ..., "parameters": ...} ipython', "llama3_json", None),
        ("<start_function_call>", "functiongemma", None),
        ("{% for m in messages %}", None, None),
        (None, None, None),
    ],
)
def test_choice_by_template(template, tools, reasoning):
    found = choose(tool_formats(), "auto", template, "serve.tool_parser")
    assert (found and found.name) == tools
    thinks = choose(reasoning_formats(), "auto", template, "serve.reasoning_parser")
    assert (thinks and thinks.name) == reasoning


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match=r"serve.tool_parser is 'nope'.*hermes"):
        choose(tool_formats(), "nope", None, "serve.tool_parser")
    assert choose(tool_formats(), "none", "<tool_call>", "serve.tool_parser") is None
