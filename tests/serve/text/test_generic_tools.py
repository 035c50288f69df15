"""Tools for models whose chat template knows none: prompts, and answers over HTTP."""

import json
import logging

import anthropic
import openai
import pytest
import support_tokenizer
from support_serving import MODEL

from girih.kernels.base.errors import RequestError
from girih.serve.http.generation import rendering
from girih.serve.text import generic_tools
from girih.serve.text.chat_template import ChatTemplate

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Wetter für Städte.", "parameters": CITY}
TOOLS = [
    {"type": "function", "function": {**FUNCTION, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": None}},
]
QUESTION = {"role": "user", "content": "How is Oslo?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CHATML = ChatTemplate(support_tokenizer.CHAT)
NO_SYSTEM = ChatTemplate(
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no ' + m.role) }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def calling(arguments, content="Let me see."):
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def result(text):
    return {"role": "tool", "tool_call_id": "1", "content": text}


def shown(messages, template=NO_SYSTEM, tools=None, **options):
    options = {"add_generation_prompt": False, **options}
    return generic_tools.render(template, messages, {}, tools, **options)


def test_functions_are_told_by_the_system():
    text = shown([QUESTION], CHATML, TOOLS)
    opening = text.removeprefix("<|im_start|>system\n")
    assert opening != text
    assert json.dumps(FUNCTION, ensure_ascii=False) + '\n{"name": "now"}\n' in opening
    assert generic_tools.EXAMPLE in opening
    with_system = shown([{"role": "system", "content": "Be kind."}, QUESTION], CHATML, TOOLS)
    assert with_system == f"<|im_start|>system\nBe kind.\n\n{opening}"


def test_functions_are_told_by_the_user_where_there_is_no_system():
    text = shown([QUESTION], NO_SYSTEM, TOOLS)
    assert text.startswith("[user]You have these functions.")
    assert text.endswith("\n\nHow is Oslo?")
    with pytest.raises(RequestError, match="no system"):
        shown([{"role": "system", "content": "Be kind."}, QUESTION], NO_SYSTEM, TOOLS)
    with pytest.raises(RequestError, match="no system"):  # not what the second try ends in
        shown([QUESTION, QUESTION], NO_SYSTEM, TOOLS)


def test_calls_and_results_are_words_that_take_turns():
    history = [QUESTION, calling('{"city": "Oslo"}'), result("rain"), result("3 °C")]
    expected = (
        f"[user]How is Oslo?[assistant]Let me see.\n{CALL}[user]<tool_response>\nrain\n"
        "</tool_response>\n<tool_response>\n3 °C\n</tool_response>"
    )
    assert shown(history) == expected
    assert shown([*history, {"role": "user", "content": "And?"}]) == expected + "\nAnd?"
    again = shown([*history, {"role": "assistant", "content": "Wet."}, QUESTION])
    assert again == expected + "[assistant]Wet.[user]How is Oslo?"


@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'])
def test_a_call_without_words(arguments):
    assert shown([QUESTION, calling(arguments, None)]) == f"[user]How is Oslo?[assistant]{CALL}"


def test_damaged_arguments_stay_text():
    damaged = shown([QUESTION, calling('{"city": "Os')])
    assert damaged.endswith(CALL.replace('Oslo"}', "Os"))


def test_a_template_that_shows_calls_does_so_when_no_tools_are_given():
    knows = ChatTemplate("{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}")
    assert shown([calling({})], knows) == json.dumps(calling({})["tool_calls"])
    assert "You have these functions." in shown([calling({})], CHATML, TOOLS)


@pytest.mark.parametrize(
    ("source", "parser", "needed"),
    [
        (support_tokenizer.CHAT, "auto", True),
        ("{{ tools }} in a format from elsewhere", "auto", True),
        ("{{ tools }} <tool_call>", "auto", False),
        (support_tokenizer.CHAT, "llama3_json", False),
        (support_tokenizer.CHAT, "none", False),
    ],
)
def test_when_they_are_needed(source, parser, needed):
    assert generic_tools.are_needed(ChatTemplate(source), parser) is needed


def test_offline_chats_are_told_too():
    tokenizer = support_tokenizer.byte_level()
    text = tokenizer.render_chat([QUESTION], tools=TOOLS, add_generation_prompt=False)
    assert text == shown([QUESTION], CHATML, TOOLS)
    own = tokenizer.render_chat([QUESTION], tools=TOOLS, chat_template="{{ tools | length }}")
    assert own == "2"


@pytest.fixture(scope="module")
def tokenizer():
    return support_tokenizer.byte_level()


@pytest.fixture
def server(new_server, tokenizer):
    """Its model answers with a call, whatever it is asked."""
    answer = [*tokenizer.encode("I look.\n" + CALL), tokenizer.token_id("<|im_end|>")]
    prompts = []

    def next_token(row):
        prompts[:] = prompts or [len(row)]
        return answer[(len(row) - prompts[0]) % len(answer)]

    server = new_server(
        tokenizer=tokenizer,
        eos=(tokenizer.token_id("<|im_end|>"),),
        next_token=next_token,
        max_model_len=1024,
        num_blocks=256,
    )
    server.prompts = prompts
    return server


def test_a_free_choice_of_tools_is_answered_on_every_route(server, caplog):
    rendering._log_words.cache_clear()
    caplog.set_level(logging.WARNING)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        asked = {"model": MODEL, "messages": [QUESTION], "tools": TOOLS}
        for choice in (openai.NOT_GIVEN, "auto"):
            answer = client.chat.completions.create(**asked, tool_choice=choice)
            message = answer.choices[0].message
            [call] = message.tool_calls
            assert (message.content, call.function.name) == ("I look.", "get_weather")
            assert json.loads(call.function.arguments) == {"city": "Oslo"}
            server.prompts.clear()
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0].message
        assert final.content == "I look."
        assert final.tool_calls[0].function.arguments == call.function.arguments
        server.prompts.clear()
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        answer = client.responses.create(model=MODEL, input="How is Oslo?", tools=tools)
        assert [item.type for item in answer.output] == ["message", "function_call"]
        server.prompts.clear()
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        tools = [{"name": "get_weather", "input_schema": CITY}]
        asked = {"model": MODEL, "messages": [QUESTION], "tools": tools}
        answer = client.messages.create(**asked, max_tokens=200)
        assert [block.type for block in answer.content] == ["text", "tool_use"]
        counted = client.messages.count_tokens(**asked).input_tokens
        assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    told = [record.getMessage() for record in caplog.records if "known formats" in record.message]
    assert len(told) == 1
    assert told[0].startswith(f"the chat template of {MODEL} has none of the known formats")


def test_the_prompt_is_the_same_on_every_route(server, tokenizer):
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": [QUESTION, calling({}), result("rain")], "tools": tools}
    tokens = server.post("/tokenize", **body).json()["tokens"]
    text = shown(body["messages"], CHATML, tools, add_generation_prompt=True)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    for fields in ({}, {"ignore_eos": True, "max_tokens": 3}):
        answer = server.post("/v1/chat/completions", **body, return_token_ids=True, **fields)
        assert answer.json()["prompt_token_ids"] == tokens, answer.text
        server.prompts.clear()
    answer = server.post("/tokenize", messages=body["messages"]).json()["tokens"]
    assert tokenizer.decode(answer, False) == shown(body["messages"], CHATML) + (
        "<|im_start|>assistant\n"
    )


def test_a_server_that_reads_no_calls_says_so(new_server):
    server = new_server(serve={"tool_parser": "none"})
    answer = server.post("/v1/chat/completions", messages=[QUESTION], tools=TOOLS)
    assert answer.status_code == 400
    assert "serve.tool_parser is none" in answer.json()["error"]["message"]
