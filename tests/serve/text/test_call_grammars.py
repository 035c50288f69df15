"""Whatever a grammar of calls lets through, the parser of its format reads back as valid calls."""

from __future__ import annotations

import functools
import json
import random

import numpy as np
import pytest
from jsonschema import validate
from support_tokenizer import _trained_byte_level, byte_level
from tokenizers import AddedToken, Tokenizer

from girih.kernels.base.errors import RequestError
from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured.llguidance_backend import make_backend
from girih.runtime.structured.token_bytes import TokenBytes
from girih.runtime.structured.vocabulary import Vocabulary
from girih.serve.http.anthropic.protocol import MessagesRequest
from girih.serve.http.anthropic.protocol import as_chat as messages_as_chat
from girih.serve.http.generation.chat_form import ChatForm, ChatFormats, formats_of
from girih.serve.http.generation.protocol import ChatCompletionRequest
from girih.serve.http.responses.protocol import ResponsesRequest
from girih.serve.http.responses.protocol import as_chat as responses_as_chat
from girih.serve.text.chat_template import ChatTemplate
from girih.serve.text.parsers import deepseek, gemma, grammars, harmony, mistral, qwen3_coder
from girih.serve.text.parsers.combine import make_parser
from girih.serve.text.parsers.grammar_writer import Tool, Writer, listed
from girih.serve.text.parsers.machine import Context
from girih.serve.text.parsers.parts import ChatDelta
from girih.serve.text.parsers.registry import ToolFormat, reasoning_formats, tool_formats

EOS = 2
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "code": {"type": "string", "pattern": "^[A-F]{2}"},
        "note": {"type": ["string", "null"], "maxLength": 3},
    },
    "required": ["city", "flags", "note"],
    "additionalProperties": False,
}
OPTIONAL = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"get_weather": CITY, "choose": OPTIONAL, "now": NOTHING}
CONTROL = [
    harmony.CHANNEL, harmony.MESSAGE, harmony.START, harmony.CONSTRAIN, harmony.ENDS[0],
    deepseek.CALLS, deepseek.CALLS_END, deepseek.CALL, deepseek.CALL_END, deepseek.SEPARATOR,
    mistral.START, mistral.ARGUMENTS, gemma.GEMMA4.start, gemma.GEMMA4.end, gemma.GEMMA4.quote,
]  # fmt: skip
ENDS = [
    gemma.FUNCTION_GEMMA.quote, gemma.GEMMA4.quote, "\n" + qwen3_coder.PARAMETER_END, "</think>",
    harmony.ENDS[0],
]  # fmt: skip


class Walker:
    """Writes random texts of a grammar.

    Args:
        control: tokens to add as control tokens.
    """

    def __init__(self, control):
        backend = Tokenizer.from_str(_trained_byte_level())
        backend.add_tokens([AddedToken(text, special=True) for text in control])
        size = backend.get_vocab_size()
        token_bytes = TokenBytes(backend)
        words = [token_bytes.of(i) for i in range(size)]
        self.vocabulary = Vocabulary(words, token_bytes.special_ids, (EOS,), backend)
        self.backend = make_backend(self.vocabulary, 1)
        ends = [i for i, word in enumerate(words) if word in (b'"', b"}", b"]", b"<", b"\n", b")")]
        self.weights = np.ones(size)
        self.weights[[*ends, EOS, *self.vocabulary.special_ids]] = 60.0
        self.weights[[i for i, word in enumerate(words) if not word.strip()]] = 0.01

    def control_id(self, text):
        token_id = self.vocabulary.encoder.token_to_id(text)
        return token_id if token_id in self.vocabulary.special_ids else None

    def encode(self, text):
        """Tokens of a text in which control tokens are written by their names."""
        return self.vocabulary.encoder.encode(text, add_special_tokens=False).ids

    def takes(self, grammar, text):
        """Whether a text may begin an output, and whether it may end there."""
        matcher = self.backend.compile(StructuredOutput.grammar(grammar)).matcher()
        is_taken = all(matcher.accept(token) for token in self.encode(text))
        return is_taken, is_taken and matcher.raw.is_accepting()

    def walk(self, grammar, seed, marks=ENDS, start=""):
        matcher = self.backend.compile(StructuredOutput.grammar(grammar)).matcher()
        rng = random.Random(seed)
        ids = self.encode(start)
        assert all(map(matcher.accept, ids)), start
        while len(ids) < 700:
            mask = np.zeros((1, -(-len(self.weights) // 32)), np.int32)
            self.backend.fill([matcher], [0], mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(self.weights)]
            allowed = np.flatnonzero(bits).tolist()
            assert allowed, (matcher.error, self.text(ids))
            [token] = rng.choices(allowed, [self.weights[i] for i in allowed])
            for next_token in self._marker(matcher, rng, marks) or [token]:
                assert matcher.accept(next_token)
                ids.append(next_token)
            if matcher.is_stopped:
                return self.text(ids[:-1])
        raise AssertionError("endless: " + self.text(ids)[-300:])

    def _marker(self, matcher, rng, marks):
        """Now and then what begins or ends a text, which chance alone would not spell."""
        ids = self.encode(rng.choice(marks))
        fits = matcher.raw.validate_tokens(ids) == len(ids)
        return ids if fits and rng.random() < 0.3 else []

    def text(self, ids):
        return b"".join(self.vocabulary.tokens[i] for i in ids).decode("utf-8", "replace")


@pytest.fixture(scope="module", params=[[], CONTROL], ids=["as text", "as control tokens"])
def walker(request):
    return Walker(request.param)


def read(text, tools, reasoning=None, **context):
    parser = make_parser(
        reasoning_formats()[reasoning] if reasoning else None,
        tool_formats()[tools] if tools else None,
        Context(tools=TOOLS, **context),
    )
    total = ChatDelta()
    for character in text:
        total.merge(parser.push(character, []))
    total.merge(parser.finish())
    return total


def write(walker, name, seed, template="", many=True, reasoning=None, is_thinking=False):
    writer = Writer(walker.control_id, template)
    tools = [Tool(tool, schema) for tool, schema in TOOLS.items()]
    body = grammars.calls(writer, name, tools, many)
    thinks = reasoning_formats()[reasoning] if reasoning else None
    before = grammars.thoughts(writer, thinks, is_thinking)
    return walker.walk(grammars.whole(writer, f"{before} {body}"), seed)


def free_grammar(walker, name, template="", many=True, reasoning=None, is_thinking=False):
    writer = Writer(walker.control_id, template)
    tools = [Tool(tool, schema) for tool, schema in TOOLS.items()]
    thinks = reasoning_formats()[reasoning] if reasoning else None
    start = grammars.free(writer, name, tools, many, thinks, is_thinking)
    return grammars.whole(writer, start)


def check(found, is_single=False):
    assert found.tool_calls
    assert not found.content
    check_calls(found, is_single)


def check_calls(found, is_single=False):
    assert len(found.tool_calls) <= 1 or not is_single
    for call in found.tool_calls:
        validate(json.loads(call.arguments), TOOLS[call.name])


def test_every_format_has_a_grammar():
    assert set(grammars.CALLS) == set(tool_formats())


TEMPLATES = {"mistral": ["", mistral.ARGUMENTS], "deepseek_v3": ["", deepseek.FENCE]}


@pytest.mark.parametrize("name", sorted(grammars.CALLS))
@pytest.mark.parametrize("seed", range(4))
def test_calls_are_read_back(walker, name, seed):
    for template in TEMPLATES.get(name, [""]):
        text = write(walker, name, seed, template)
        check(read(text, name))


@pytest.mark.parametrize("name", sorted(grammars.CALLS))
def test_one_call_when_one_is_allowed(walker, name):
    check(read(write(walker, name, 7, many=False), name), is_single=True)


@pytest.mark.parametrize("is_thinking", [False, True])
@pytest.mark.parametrize(
    ("reasoning", "name"), [("qwen3", "hermes"), ("deepseek_r1", "deepseek_v3"), ("gpt_oss",) * 2]
)
def test_reasoning_may_come_first(walker, reasoning, name, is_thinking):
    texts = [
        write(walker, name, seed, reasoning=reasoning, is_thinking=is_thinking) for seed in range(6)
    ]
    for text in texts:
        check(read(text, name, reasoning, is_thinking=is_thinking))


# ---- outputs that may have calls ----

BEGINNINGS = {
    "hermes": "<tool_call>", "qwen3_coder": "<function=", "mistral": mistral.START,
    "deepseek_v3": deepseek.CALLS, "functiongemma": gemma.FUNCTION_GEMMA.start,
    "gemma4": gemma.GEMMA4.start, "gpt_oss": harmony.CHANNEL + "commentary to=functions.",
    "llama3_json": "{", "json_list": "[{", "pythonic": "[",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(grammars.CALLS))
@pytest.mark.parametrize("many", [True, False])
def test_whatever_call_is_begun_is_one_of_the_tools(walker, name, many):
    begun = BEGINNINGS[name]
    for template in TEMPLATES.get(name, [""]):
        grammar = free_grammar(walker, name, template, many)
        for seed in range(4):
            found = read(walker.walk(grammar, seed, start=begun), name)
            assert found.tool_calls
            check_calls(found, not many)
            check_calls(read(walker.walk(grammar, seed, [begun, *ENDS]), name), not many)


CALL = '\n{"name": "choose", "arguments": {"a": 1}}\n</tool_call>'
BAD = '\n{"name": "choose", "arguments": {"a": 3'
OUTPUTS = [
    # parser, may text go on like this, may it end there
    ("hermes", None, "Hello <tool_ca", True, True),
    ("hermes", None, "Hello <tool_call>", True, False),
    ("hermes", None, "Hello <tool_call>" + CALL, True, True),
    ("hermes", None, f"<tool_call>{CALL} and <tool_call>{CALL}\nDone.", True, True),
    ("hermes", None, f"<tool_call>{CALL} and <tool_call>{BAD}", False, False),
    ("hermes", None, "Hello <tool_call>" + BAD, False, False),
    ("hermes", None, "<tool_call> {", False, False),
    ("hermes", "qwen3", "\n<think> a <tool_call>{}</tool_call>", True, False),
    ("hermes", "qwen3", f"<think> a <tool_call></think> b <tool_call>{CALL}", True, True),
    ("hermes", "qwen3", f"<think> a</think><tool_call>{BAD}", False, False),
    ("hermes", "qwen3", f"I <think> <tool_call>{BAD}", False, False),
    ("hermes", "deepseek_r1", "a <tool_call> b</think>c", True, True),
    ("qwen3_coder", None, "a <function=choose>\n<parameter=a>\n1\n</parameter>\n", True, False),
    ("qwen3_coder", None, "<function=choose>\n<parameter=a>\n3", False, False),
    ("llama3_json", None, 'Say {"a": 3}', True, True),
    ("llama3_json", None, ' {"name": "choose", "parameters": {"a": 1}}', True, True),
    ("llama3_json", None, ' {"a"', False, False),
    ("json_list", None, "[1, 2]", True, True),
    ("json_list", None, '[{"a"', False, False),
    ("pythonic", None, "a [1]", True, True),
    ("pythonic", None, "[choose(a=1)]", True, True),
    ("pythonic", None, "[choose(a=3", False, False),
    ("functiongemma", None, "x <start_function_call>call:choose{a:1}", True, False),
    ("functiongemma", None, "x <start_function_call>call:choose{a:3", False, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "reasoning", "text", "goes_on", "ends"), OUTPUTS)
def test_text_is_free_until_a_call_begins(name, reasoning, text, goes_on, ends):
    walker = plain_walker()
    grammar = free_grammar(walker, name, reasoning=reasoning)
    assert walker.takes(grammar, text) == (goes_on, ends)


def asked(**fields):
    tool = {"type": "function", "function": {"name": "f", **fields}}
    return ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=[tool])


def test_only_a_strict_tool_makes_a_grammar_of_a_free_choice():
    formats = ChatFormats(tool_formats()["hermes"], None, "")
    assert ChatForm(asked(), byte_level(), formats).structured(None, [1]) is None
    form = ChatForm(asked(strict=True), byte_level(), formats).structured(None, [1])
    assert form.kind == "grammar"


NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("fields", "text", "begins", "ends"),
    [
        ({}, "Words with 1 < 2.", True, True),
        ({}, NOW, True, True),
        ({}, f"I look.\n{NOW}", True, True),
        ({}, NOW.replace("now", "never"), False, False),
        ({}, f"{NOW} more", False, False),
        ({"parallel_tool_calls": True}, f"{NOW}\n{NOW} more", True, True),
        ({"tool_choice": "required"}, NOW, True, True),
        ({"tool_choice": "required"}, f"{NOW}\n{NOW}", False, False),
        ({"tool_choice": "required", "parallel_tool_calls": True}, f"{NOW}\n{NOW}", True, True),
        ({"tool_choice": "required"}, "Words", False, False),
    ],
)
def test_calls_that_a_model_is_only_told_of_are_valid_and_one(fields, text, begins, ends):
    tools = [{"type": "function", "function": {"name": "now", "parameters": NOTHING}}]
    body = ChatCompletionRequest(messages=[], tools=tools, **fields)
    formats = formats_of(ChatTemplate("{{ messages }}"), "auto", "auto")
    form = ChatForm(body, byte_level(), formats).structured(None, [1])
    assert plain_walker().takes(form.text, text) == (begins, ends)


def test_no_form_where_an_answer_may_not_end():
    formats = formats_of(ChatTemplate("{{ messages }}"), "auto", "auto")
    body = asked().model_copy(update={"ignore_eos": True})
    assert ChatForm(body, byte_level(), formats).structured(None, [1]) is None


def required(**fields):
    body = asked(**fields)
    body.tool_choice = "required"
    return ChatForm(body, byte_level(), ChatFormats(tool_formats()["hermes"], None, ""))


ARGUMENTS = [
    ({}, ["{}"], ['{"a": 1}', '"a"']),
    ({"parameters": None}, ["{}"], ['{"a": 1}']),
    ({"parameters": {}}, ["{}"], ['{"a": 1}']),
    ({"parameters": {"properties": {}}}, ["{}", '{"a": 1}'], ['"a"']),
    ({"parameters": {"type": "object"}}, ["{}", '{"a": 1}'], ["[]"]),
    ({"parameters": {"type": ["object", "null"]}}, ["{}"], ["null"]),
    ({"parameters": {"anyOf": [{"type": "null"}, {"type": "object"}]}}, ["{}"], ["null"]),
    ({"parameters": {"type": "object", "properties": {}}, "strict": True}, ["{}"], ['{"a": 1}']),
]


@pytest.mark.parametrize(("fields", "good", "bad"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments_are_an_object_and_none_without_parameters(fields, good, bad):
    walker = plain_walker()
    form = required(**fields).structured(None, [1])
    for is_good, values in ((True, good), (False, bad)):
        for value in values:
            call = f'<tool_call>\n{{"name": "f", "arguments": {value}}}\n</tool_call>'
            assert walker.takes(form.text, call)[1] == is_good, value


@pytest.mark.parametrize("kind", ["string", ["array", "null"]])
def test_parameters_of_another_type_are_refused(kind):
    with pytest.raises(
        RequestError, match=r"tools\[0\]\.function\.parameters has the type"
    ) as caught:
        required(parameters={"type": kind})
    assert caught.value.param == "tools"


def test_a_format_without_a_grammar_refuses_strict_tools():
    formats = ChatFormats(ToolFormat("mine", tool_formats()["hermes"].run), None, "")
    with pytest.raises(RequestError, match="no grammar for the calls of 'mine'"):
        ChatForm(asked(strict=True), byte_level(), formats)
    assert ChatForm(asked(), byte_level(), formats)


def test_strict_reaches_the_chat_from_other_routes():
    ask = [{"role": "user", "content": "x"}]
    tool = {"name": "f", "strict": True, "input_schema": {}}
    chat = messages_as_chat(MessagesRequest(messages=ask, max_tokens=1, tools=[tool]))
    assert chat.tools[0]["function"]["strict"] is True
    tool = {"type": "function", "name": "f", "strict": True}
    chat = responses_as_chat(ResponsesRequest(input="x", tools=[tool]), ask)
    assert chat.tools[0]["function"]["strict"] is True


@functools.cache
def plain_walker():
    return Walker([])


@pytest.mark.parametrize(("schema", "good", "bad"), [
    ({"type": "string", "format": "date"}, ["2024-02-28", "2024-12-31"], ["2024-02-30", "x"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-03T10:11:12Z"], ["2024-02-03"]),
    ({"type": "string", "format": "uuid"}, ["01234567-89ab-cdef-0123-456789abcdef"], ["0123"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "1:2:3:4:5:6:7:8"], ["1:2"]),
    ({"type": "string", "format": "email"}, ["a.b@c-d.org"], ["a@"]),
    ({"type": "string", "format": "uri"}, ["https://a.org/b?c=d"], ["a.org"]),
    ({"type": "string", "format": "duration"}, ["P3D", "PT5M"], ["3D"]),
    ({"type": "string", "pattern": "b+"}, ["abba", "b"], ["a"]),
    ({"type": "string", "pattern": "^a/b$"}, ["a/b"], ["a/bc", "xa/b"]),
    ({"type": "string", "pattern": "^a", "maxLength": 2}, ["ab"], ["abc", "b"]),
    ({"type": "string", "minLength": 1}, ["a\n<b"], ["", "a</parameter>"]),
    ({"type": "string", "enum": ["a.b", "c"]}, ["a.b", "c"], ["axb"]),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", "null"], ["None"]),
    ({"type": ["string", "null"], "maxLength": 2}, ["ab", "null"], ["abc"]),
    ({"const": "x", "type": "string"}, ["x"], ["y"]),
    ({"type": "string"}, ["", "</param"], ["a</parameter> b"]),
])  # fmt: skip
def test_texts_without_quotes_keep_to_their_schema(schema, good, bad):
    walker = plain_walker()
    tool = Tool("f", {"type": "object", "properties": {"x": schema}, "required": ["x"]})
    writer = Writer(walker.control_id)
    grammar = grammars.whole(writer, grammars.calls(writer, "qwen3_coder", [tool], True))
    for is_good, values in ((True, good), (False, bad)):
        for value in values:
            text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n"
            assert walker.takes(grammar, text)[0] == is_good, value


def test_listed_items():
    assert listed([], '","') == ""
    assert listed([("a", True), ("b", False)], "s") == "(a (s b)?)"
    assert listed([("a", False), ("b", True)], "s") == "(a (s b) | b)"
    assert listed([("a", False), ("b", False)], "s") == "(a (s b)? | b)?"
