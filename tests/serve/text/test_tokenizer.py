import json

import pytest
import support_tokenizer

from girih.kernels.base.errors import RequestError, SourceError
from girih.serve.text.chat_template import ChatTemplate
from girih.serve.text.tokenizer import load_tokenizer

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]


def write_model(path, template=None, **config):
    (path / "tokenizer.json").write_text(support_tokenizer._trained_byte_level())
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return load_tokenizer(path)


def test_round_trip_and_unknown_ids(tmp_path):
    tokenizer = write_model(tmp_path)
    text = "naïve 😀 你好 <|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode([*ids, 10_000], skip_special_tokens=True) == "naïve 😀 你好 "
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.token_bytes(10_000) == b""


def test_added_tokens_with_spaces_have_their_own_bytes(tmp_path):
    tokenizer = write_model(tmp_path)
    (token_id,) = tokenizer.encode("<tool call>")
    assert tokenizer.token_bytes(token_id) == b"<tool call>"


def test_lone_surrogates_are_a_request_error(tmp_path):
    with pytest.raises(RequestError):
        write_model(tmp_path).encode("\ud800")


def test_template_file_wins_over_the_config(tmp_path):
    tokenizer = write_model(tmp_path, "{{ bos_token }}file", chat_template="c", bos_token="<s>")
    assert tokenizer.render_chat(MESSAGES) == "<s>file"


TOOL_USE = "{{ tools[0].function.name }}"
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


@pytest.mark.parametrize("place", ["files", "config", "config and files"])
def test_named_templates(tmp_path, place):
    named = {"default": "d", "tool_use": TOOL_USE, "rag": "r"}
    entries = [{"name": name, "template": text} for name, text in named.items()]
    if place != "config":
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(named[name])
    if place == "files":
        tokenizer = write_model(tmp_path, "d", chat_template=[{"name": "other", "template": "o"}])
    elif place == "config":
        tokenizer = write_model(tmp_path, chat_template=entries)
    else:
        tokenizer = write_model(tmp_path, chat_template=entries[:1])
    assert {name: t.source for name, t in tokenizer.chat_templates.items()} == named
    assert tokenizer.render_chat(MESSAGES) == "d"
    assert tokenizer.render_chat(MESSAGES, tools=[]) == "d"
    assert tokenizer.render_chat(MESSAGES, tools=TOOLS) == "look_up"
    assert tokenizer.render_chat(MESSAGES, tools=TOOLS, chat_template="rag") == "r"
    assert tokenizer.render_chat(MESSAGES, chat_template="{{ 'own' }}") == "own"
    with pytest.raises(RequestError, match=r"chat_template is 'tool'.*: default, rag, tool_use"):
        tokenizer.render_chat(MESSAGES, chat_template="tool")


def test_a_model_without_a_main_template_names_the_others(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    tokenizer = write_model(tmp_path)
    assert tokenizer.render_chat(MESSAGES, tools=TOOLS) == "look_up"
    with pytest.raises(RequestError, match="choose one with chat_template: tool_use"):
        tokenizer.render_chat(MESSAGES)


def test_no_template_is_a_request_error(tmp_path):
    with pytest.raises(RequestError, match="no chat template"):
        write_model(tmp_path).render_chat(MESSAGES)


def test_damaged_files_are_source_errors(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(SourceError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(SourceError, match=r"a chat template in .* could not be read"):
        write_model(tmp_path, chat_template="x")
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system') }}",
        "{{ messages.foo.bar }}",
        "{% for %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_failing_or_hostile_template_is_a_request_error(source):
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source).render(MESSAGES, {})


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot", "content": "x"}, "role"),
        ({"role": "user", "content": 3}, "content is a number"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "image_url"),
    ],
)
def test_bad_messages_name_the_fault(message, words):
    with pytest.raises(RequestError, match=words):
        ChatTemplate("{{ messages }}").render([message], {})


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rendered = ChatTemplate(support_tokenizer.CHAT).render([{"role": "user", "content": parts}], {})
    assert rendered == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"


def test_continue_final_message_leaves_the_turn_open():
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is "}]
    opened = {"add_generation_prompt": False, "continue_final_message": True}
    rendered = ChatTemplate(support_tokenizer.CHAT).render(messages, {}, **opened)
    assert rendered.endswith("assistant\nThe answer is ")
    for source in ("x", "{{ messages[-1].content | lower }}", "{{ messages[-1].content[9:] }}"):
        with pytest.raises(RequestError, match="leaves it out or changes it"):
            ChatTemplate(source).render(messages, {}, **opened)
    with pytest.raises(RequestError, match="needs a last message"):
        ChatTemplate("x").render([], {}, **opened)
    with pytest.raises(RequestError, match="both true"):
        ChatTemplate("x").render(messages, {}, continue_final_message=True)


@pytest.mark.parametrize("text", ["<", "|", "end", "im", "_", "", "\n", " a ", "<|im_end|>", "T"])
@pytest.mark.parametrize("filters", ["", " | trim"])
def test_what_is_continued_ends_where_the_message_does(text, filters):
    source = support_tokenizer.CHAT.replace("m['content']", "m['content']" + filters)
    messages = [*MESSAGES, {"role": "assistant", "content": text}]
    opened = {"add_generation_prompt": False, "continue_final_message": True}
    before = ChatTemplate(source).render(MESSAGES, {})
    rendered = ChatTemplate(source).render(messages, {}, **opened)
    # A template that strips leaves no white space at the end, not even its own.
    assert rendered == ((before + text.strip()).rstrip() if filters else before + text)
    assert rendered == transformers_render(source, messages, continue_final_message=True)


def transformers_render(source, messages, **options):
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], _ = render_jinja_template([messages], chat_template=source, **options)
    return text


def test_arguments_of_calls_reach_the_template_as_a_map():
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.city }}")
    assert template.render(call('{"city": "Oslo"}'), {}) == "Oslo"
    assert template.render(call({"city": "Oslo"}), {}) == "Oslo"
    assert template.render(call('{"city": "O\nslo"}'), {}) == "O\nslo"
    for arguments in ("", "null", "{}", None):
        assert ChatTemplate(ARGUMENTS).render(call(arguments), {}) == "{}"


ARGUMENTS = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"


def call(arguments):
    function = {"name": "weather", "arguments": arguments}
    return [{"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}]


@pytest.mark.parametrize("damaged", ["{", "[" * 5000, '{"a": 1', "3", "[1]", [1], '"x"', 'a "b"'])
def test_damaged_arguments_are_text_or_an_empty_map(damaged):
    text = damaged if isinstance(damaged, str) else "[1]"
    shown = {
        ARGUMENTS: "{}",
        "{{ messages[0].tool_calls[0].function.arguments.items() | list }}": "[]",
        ARGUMENTS.replace(
            "| tojson", "if messages[0].tool_calls[0].function.arguments is string else 'map'"
        ): text,
        ARGUMENTS.replace("{{", "{{ 'a' +").replace("| tojson", "+ 'b'"): f"a{text}b",
    }
    for source, expected in shown.items():
        assert ChatTemplate(source).render(call(damaged), {}) == expected


def test_arguments_are_text_for_a_template_that_takes_no_map():
    source = "{{ 'a' + messages[0].tool_calls[0].function.arguments + 'b' }}"
    assert ChatTemplate(source).render(call({"city": "Zürich"}), {}) == 'a{"city": "Zürich"}b'
    with pytest.raises(RequestError, match="no calls here"):
        ChatTemplate("{{ raise_exception('no calls here') }}").render(call({}), {})


def test_what_is_null_or_an_empty_list_of_calls_is_not_there():
    sent = {"role": "assistant", "content": "x", "refusal": None, "name": None, "reasoning": None}
    source = "{{ messages[0] | list | join(' ') }}"
    for calls in (None, []):
        assert ChatTemplate(source).render([{**sent, "tool_calls": calls}], {}) == "role content"
    with pytest.raises(RequestError, match=r"tool_calls is text; it must be a list"):
        ChatTemplate(source).render([{**sent, "tool_calls": ""}], {})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_every_name_that_templates_use(name):
    source = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    assert ChatTemplate(source).render([{"role": "assistant", name: "hm"}], {}) == "hm hm"


def test_generation_blocks_and_loop_controls_are_understood():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert ChatTemplate(source).render(MESSAGES, {}) == "S"


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{{ messages[0].role }}", "system"),
        ("{% if messages[0].role == 'developer' %}developer{% endif %}", "developer"),
    ],
)
def test_a_developer_is_the_system_unless_the_template_knows_him(source, role):
    message = {"role": "developer", "content": "Be brief."}
    assert ChatTemplate(source).render([message], {}) == role
