"""Our template environment against transformers' own, on chosen and on generated templates."""

import json
import re
import warnings

import pytest
import support_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from support_conformance import cases
from support_templates import FILTERS, templates
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from girih.serve.text.chat_template import ChatTemplate, _environment
from girih.serve.text.tokenizer import load_tokenizer

SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
LIBRARY = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer.from_str(support_tokenizer._trained_byte_level()), **SPECIAL
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "\n", "<", "|", "im", "end", "_", "Hello", " a b ", "<|im_end|>", "é😀"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "ä <b>",
        "parameters": {"type": "object", "b": 1, "a": [1.5]},
    },
}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "f", "arguments": {"b": "é", "a": None}},
}


@st.composite
def messages(draw, has_calls=True):
    """A conversation as both sides read it: texts, arguments as maps, fields that are null."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
        message = {"role": role, "content": draw(TEXTS)}
        if draw(st.booleans()):
            message["name"] = draw(st.sampled_from([None, "x"]))
        if role == "assistant" and draw(st.booleans()):
            message[draw(st.sampled_from(["reasoning_content", "reasoning", "thinking"]))] = draw(
                TEXTS
            )
        if has_calls and role == "assistant" and draw(st.booleans()):
            message["tool_calls"] = draw(st.sampled_from([None, [CALL], [CALL, CALL]]))
        made.append(message)
    return made


def outcome(render):
    """The text, without addresses of objects; None where there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of code like 1[0]
            return re.sub(" at 0x[0-9a-f]+", "", render(), flags=re.IGNORECASE)
    except Exception:
        return None


def compare(source, conversation, **options):
    options = {"add_generation_prompt": False, "tools": None, **options}
    theirs = outcome(
        lambda: LIBRARY.apply_chat_template(
            conversation, chat_template=source, tokenize=False, **options
        )
    )
    ours = outcome(lambda: ChatTemplate(source).render(conversation, SPECIAL, **options))
    if theirs is None and any(message.get("tool_calls") for message in conversation):
        return  # we try arguments as text then
    assert ours == theirs, source


@cases(300)
@given(
    source=templates(),
    conversation=messages(),
    tools=st.sampled_from([None, [TOOL]]),
    opens=st.booleans(),
)
def test_generated_templates_show_the_same(source, conversation, tools, opens):
    compare(source, conversation, tools=tools, add_generation_prompt=opens)


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_every_filter_gives_the_same(name):
    values = [
        "messages", "messages | map(attribute='content') | list", "messages[0]", "tools",
        "tools[0]",
        "'<b>it\\'s %s</b> http://x.org'", "'Aa bB 0x1f'", "-2.5", "7", "none", "missing", "true",
        "['b', 'A', 'a', 'b']", "{'b': 1, 'a': 'é\\n'}", "[{'x': 1}, {'x': 2.5}]", "'a\\nb\\n\\nc'",
    ]  # fmt: skip
    conversation = [
        {"role": "user", "content": "é <i>"},
        {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        {"role": "user", "content": ""},
    ]
    for value in values:
        for arguments in FILTERS[name]:
            compare(f"{{{{ {value} | {name}{arguments} }}}}", conversation[::2], tools=[TOOL])


def test_the_environments_are_the_same_but_for_what_is_replaced():
    ours, theirs = _environment(), _compile_jinja_template("x").environment
    assert {name for name in theirs.filters if name != "random"} == set(FILTERS)
    own = {
        "filters": {"tojson"},
        "tests": set(),
        "globals": {"raise_exception", "strftime_now", "namespace", "dict"},
    }
    for kind, replaced in own.items():
        mine, their = getattr(ours, kind), getattr(theirs, kind)
        assert mine.keys() == their.keys()
        assert {name for name in mine if mine[name] is not their[name]} == replaced
    for field in (
        "trim_blocks", "lstrip_blocks", "keep_trailing_newline", "newline_sequence", "autoescape",
        "undefined", "finalize", "line_statement_prefix", "line_comment_prefix", "policies",
        "block_start_string", "variable_start_string", "comment_start_string", "optimized",
    ):  # fmt: skip
        assert getattr(ours, field) == getattr(theirs, field), field
    assert [type(ours).__mro__[0]] == [type(theirs).__mro__[0]]
    tags = [sorted(t for e in side.extensions.values() for t in e.tags) for side in (ours, theirs)]
    assert tags[0] == tags[1] == ["break", "continue", "generation"]


CHOSEN = {
    "chatml": support_tokenizer.CHAT,
    "strips": support_tokenizer.CHAT.replace("m['content']", "m['content'] | trim"),
    "strips right": "{% for m in messages %}[{{ m.role }}] {{ m.content.rstrip() }} {% endfor %}",
    "space behind": "{% for m in messages %}{{ m.role }}: {{ m.content | trim }} \n{% endfor %}",
    "in a call": "{% macro show(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}"
    "<{{ m.role }}>{{ show(m) }}</{{ m.role }}>{% endfor %}",
    "twice": "{% for m in messages %}{{ m.content }}{% endfor %}|{{ messages[-1].content }}.",
    "first only": "{{ messages[0].content }}",
    "json": "{% for m in messages %}{{ [m.role, m.content] | tojson }}{% endfor %}",
    "upper": "{% for m in messages %}{{ m.content | upper }};{% endfor %}",
    "lower": "{% for m in messages %}{{ m.content | lower }};{% endfor %}",
    "escaped": "{% for m in messages %}{{ m.content | e }};{% endfor %}",
    "after a mark": "{% for m in messages %}{{ m.content.split('<')[-1].lstrip('\\n') }};"
    "{% endfor %}",
    "cut": "{% for m in messages %}{{ m.content[:12] }};{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}"
    "{% endfor %}",
    "scopes": "{% set x = 'out' %}{% generation %}{% set x = 'in' %}{{ x }}{% endgeneration %}"
    "{{ x }}{{ messages[-1].content }}",
    "break in a block": "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}"
    "{{ m.content }}{% endfor %}",
    "break": "{% for m in messages %}{{ m.content }}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{% endfor %}",
    "private names": "{% set ns = namespace() %}{% set ns._x = 1 %}{{ messages[-1].content }}",
    "names": "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.b = ns.a + ns.self %}{{ ns.b }}"
    "{{ messages[-1].content }}",
    "thoughts": "{% for m in messages %}{{ m.role }}{% if m.reasoning_content is defined %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.thinking }}{{ m.content }}"
    "{% endfor %}",
    "calls": "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    "<{{ c.function.name }}>{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}",
    "keys": "{% for m in messages %}{{ m | list | sort | join(' ') }} {{ m.content }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
@cases(30)
@given(conversation=messages(), continues=st.booleans())
def test_chosen_templates_show_the_same(name, conversation, continues):
    compare(CHOSEN[name], conversation, continue_final_message=continues)


@cases(100)
@given(source=templates(), conversation=messages(has_calls=False))
def test_generated_templates_continue_the_same(source, conversation):
    body = "{% for message in messages %}" + source + "{{ message.content }}{% endfor %}"
    compare(body, conversation, continue_final_message=True)


TOOL_USE = "{{ tools | length if tools else 0 }} tools: {{ messages[0].content }}"
MAIN, OTHER = (f"{name} {{{{ tools | length if tools }}}}" for name in ("main", "other"))
LISTED = [{"name": "default", "template": MAIN}, {"name": "tool_use", "template": TOOL_USE}]


@pytest.mark.parametrize(
    ("files", "declared"),
    [
        ({"chat_template.jinja": MAIN}, None),
        ({"chat_template.jinja": MAIN}, OTHER),
        ({"chat_template.jinja": OTHER}, LISTED),
        ({}, MAIN),
        ({}, LISTED),
        ({}, LISTED[1:]),
        ({"chat_template.jinja": MAIN, "additional_chat_templates/tool_use.jinja": TOOL_USE}, None),
        ({"chat_template.jinja": MAIN, "additional_chat_templates/rag.jinja": OTHER}, LISTED),
        ({"additional_chat_templates/tool_use.jinja": TOOL_USE}, None),
    ],
)
def test_the_same_template_of_a_directory_is_used(tmp_path, files, declared):
    LIBRARY.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if declared is not None:
        config["chat_template"] = declared
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    conversation = [{"role": "user", "content": "Hi"}]
    names = theirs.chat_template if isinstance(theirs.chat_template, dict) else {}
    assert not names or names.keys() == ours.chat_templates.keys()
    for tools in (None, [TOOL]):
        for name in (None, "{{ 'own' }}", *names):
            options = {"tools": tools, "chat_template": name, "add_generation_prompt": True}
            assert outcome(lambda o=options: ours.render_chat(conversation, **o)) == outcome(
                lambda o=options: theirs.apply_chat_template(conversation, tokenize=False, **o)
            )
