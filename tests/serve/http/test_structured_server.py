"""Forms, tools and reasoning through the real server, a tiny random model and the openai client."""

from __future__ import annotations

import json
import re
import shutil
from enum import Enum

import httpx
import openai
import pytest
from jsonschema import validate
from pydantic import BaseModel, Field
from support_models import tiny_model
from support_real_server import serving
from support_tokenizer import byte_level

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} answer in <tool_call><|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
THINKING = TEMPLATE + "<think>\n{# </think> #}"
MESSAGES = [{"role": "user", "content": "Hello!"}]
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
STRICT = [{"type": "function", "function": {**t["function"], "strict": True}} for t in TOOLS]
LLAMA = "{{ tools | tojson }} parameters ipython {% for m in messages %}{{ m.content }}{% endfor %}"
PARAMETERS = {
    "get_weather": CITY,
    "now": {"type": "object", "additionalProperties": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_model("llama"), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def url(model):
    with serving(model, {"trust_request_chat_template": True}) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)


@pytest.fixture(scope="module")
def closing():
    """A bias towards what ends things and away from space, for a model that knows no end."""
    tokenizer = byte_level()
    ends = {str(tokenizer.token_id(text)): 9 for text in ('"', "}", "]")}
    space = [i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i).strip()]
    return {**{str(i): -20 for i in space}, **ends}


def post(url, path, **body):
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=60)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int = Field(ge=0, le=9)
    color: Color


class Shape(BaseModel):
    points: list[Point] = Field(max_length=2)
    is_closed: bool


def test_parse_helper(client, closing):
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Shape, logit_bias=closing, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Shape)


def test_parse_helper_of_responses(client):
    answer = client.responses.parse(model="tiny", input="Hello!", text_format=Point)
    assert isinstance(answer.output_parsed, Point)


def test_streamed_equals_whole(client, closing):
    form = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": Shape.model_json_schema()},
    }
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 3, "response_format": form}
    whole = client.chat.completions.create(**asked, logit_bias=closing)
    stream = client.chat.completions.create(**asked, logit_bias=closing, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    validate(json.loads(text), Shape.model_json_schema())


FORMS = [
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_regex": "[a-c]{4}"}, "[a-c]{4}"),
    ({"guided_choice": ["<|im_end|>"]}, r"<\|im_end\|>"),  # its characters, not the control token
    ({"guided_json": {"enum": [1, 2]}}, "[12]"),
    ({"guided_grammar": 'root ::= "a" | "b"'}, "[ab]"),
    ({"grammar": 'root ::= word "!"\nword ::= [a-b]{1,3}'}, "[ab]{1,3}!"),
    ({"ebnf": 'root ::= "a" | "b"', "grammar": "", "regex": ""}, "[ab]"),
    ({"json_schema": {"enum": [1, 2]}}, "[12]"),
    ({"regex": "[a-c]{4}"}, "[a-c]{4}"),
    ({"structured_outputs": {"choice": ["x y"]}}, "x y"),
    ({"structured_outputs": {"regex": "q{3}", "backend": "guidance"}}, "qqq"),
    (
        {"structured_outputs": {"json": {"const": [1, 2]}, "disable_any_whitespace": True}},
        r"\[1,2\]",
    ),
    ({"structured_outputs": {"grammar": 'start: "ok"'}}, "ok"),
    ({"grammar": 'start: "<|nope|>" /<.x>/ <|im_end|> // <|no|>'}, r"<\|nope\|><.x>"),
    ({"response_format": {"type": "text"}}, r"[\s\S]*"),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "format": {"type": "const_string", "value": "tag"},
            }
        },
        "tag",
    ),
]


@pytest.mark.parametrize(("fields", "pattern"), FORMS, ids=range(len(FORMS)))
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_every_field_on_both_routes(url, path, fields, pattern):
    start = {"prompt": "x"} if path == "completions" else {"messages": MESSAGES}
    answer = post(url, path, **start, **fields, max_tokens=20)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert re.fullmatch(pattern, choice.get("text") or choice["message"]["content"])


@pytest.mark.parametrize("field", [
    {"grammar": 'root ::= "q"{3}'},
    {"structured_outputs": {"regex": "q{3}"}},
    {"guided_choice": ["qqq"]},
])  # fmt: skip
def test_a_form_on_every_other_route(url, field):
    text = post(url, "responses", input="Hello!", **field).json()["output"][-1]["content"][0][
        "text"
    ]
    assert text == "qqq"
    answer = post(url, "messages", messages=MESSAGES, max_tokens=20, **field).json()
    assert answer["content"][-1]["text"] == "qqq"
    ids = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 20, **field}}
    answer = httpx.post(f"{url}/inference/v1/generate", json=ids, timeout=60).json()
    [choice] = answer["choices"]
    assert byte_level().decode(choice["token_ids"], skip_special_tokens=True) == "qqq"
    ids["sampling_params"] = {"regex": "("}
    answer = httpx.post(f"{url}/inference/v1/generate", json=ids, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "sampling_params"


def test_a_field_of_chat_that_responses_have_elsewhere_is_refused(url):
    answer = post(url, "responses", input="Hello!", response_format={"type": "json_object"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"


REFUSED = [
    ({"grammar": 'root ::= "a\\q"'}, "grammar", r"not valid GBNF: the escape \\q"),
    ({"grammar": {"type": "json"}}, "grammar", "valid string"),
    ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar|json_schema", "both set"),
    (
        {"guided_grammar": "start: <[9999]>"},
        "guided_grammar",
        "names <.9999.>, which is no",
    ),
    ({"guided_grammar": "start: <|nope|>"}, "guided_grammar", "names <.nope.>, which"),
    (
        {"structural_tag": {"format": {"type": "grammar", "grammar": "start: <|nope|>"}}},
        "structural_tag",
        "names <.nope.>, which",
    ),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "no finite text satisfies # -> #;"),
    ({"guided_json": {"type": "x"}}, "guided_json", "at /: Invalid type: x"),
    (
        {"structured_outputs": {"json": {"items": {"type": "x"}}}},
        "structured_outputs",
        "at /items: Invalid type",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/a"}}}},
        "response_format",
        "/a",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "name and a schema"),
    ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
    ({"structured_outputs": {"haiku": True}}, "structured_outputs", "'haiku'"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "true"),
    ({"structured_outputs": {}}, "structured_outputs", "no form"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both set"),
    ({"guided_regex": "(" * 40}, "guided_regex", "at character"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "262144"),
    ({"guided_choice": []}, "guided_choice", "1 to 10000"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "structured output"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "sometimes"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "one of the tools",
    ),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "both say"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
        "tools",
        r"tools\[0\].function.strict is 'yes'; it must be true or false",
    ),
    ({"tools": STRICT, "ignore_eos": True}, "ignore_eos", "structured output"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]},
        "tools",
        r"tools\[0\].function.parameters: .*at /",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_say_where(url, fields, param, message):
    answer = post(url, "chat/completions", messages=MESSAGES, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert re.fullmatch(param, error["param"])
    assert re.search(message, error["message"])


def test_deep_and_recursive_schemas(url):
    deep = {}
    for _ in range(100):
        deep = {"items": deep}
    answer = post(url, "chat/completions", messages=MESSAGES, guided_json=deep)
    assert answer.status_code == 400
    assert "deeper than 64" in answer.json()["error"]["message"]
    node = {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    answer = post(url, "chat/completions", messages=MESSAGES, guided_json=node, max_tokens=20)
    assert answer.status_code == 200


def check_calls(message, count=None):
    assert message.tool_calls
    assert count is None or len(message.tool_calls) == count
    for call in message.tool_calls:
        validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
        assert call.id.startswith("call_")


@pytest.mark.parametrize("seed", [1, 2])
def test_required_calls(client, closing, seed):
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        seed=seed,
        logit_bias=closing,
        max_tokens=300,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert not answer.choices[0].message.content
    check_calls(answer.choices[0].message, 1)


def test_a_named_call(client, closing):
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        logit_bias=closing,
        seed=1,
    )
    assert answer.choices[0].finish_reason == "stop"
    check_calls(answer.choices[0].message, 1)
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


def test_streamed_calls_equal_whole_ones(client, closing):
    asked = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 5,
        "max_tokens": 300,
        "logit_bias": closing,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events
    assert final.finish_reason == whole.finish_reason
    assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]


def test_a_form_beside_tools_leaves_the_choice(url, closing):
    """The answer has the form, or it is a call."""
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"enum": [1, 2]}}}
    answer = post(
        url,
        "chat/completions",
        messages=MESSAGES,
        tools=TOOLS,
        response_format=form,
        n=6,
        seed=1,
        max_tokens=200,
        logit_bias=closing,
    )
    for choice in answer.json()["choices"]:
        message = choice["message"]
        if choice["finish_reason"] == "stop":
            assert message["content"] in ("1", "2")
        elif choice["finish_reason"] == "tool_calls":
            for call in message["tool_calls"]:
                function = call["function"]
                validate(json.loads(function["arguments"]), PARAMETERS[function["name"]])


def test_free_choice_of_tools_is_free(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=10
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content


def test_a_strict_tool_is_called_as_its_schema_says(client, closing):
    """The choice is the model's; a call that it begins is complete and valid."""
    asked = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": STRICT,
        "seed": 4,
        "parallel_tool_calls": False,
        "logit_bias": {**closing, str(byte_level().token_id("{")): 40},
        "extra_body": {"chat_template": LLAMA},
    }
    whole = client.chat.completions.create(**asked).choices[0]
    check_calls(whole.message, 1)
    assert whole.finish_reason == "tool_calls"
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls] == [
        (c.function.name, c.function.arguments) for c in whole.message.tool_calls
    ]
    talk = client.chat.completions.create(
        **{**asked, "logit_bias": {str(byte_level().token_id("{")): -100}, "max_tokens": 8}
    )
    assert talk.choices[0].message.content
    assert not talk.choices[0].message.tool_calls


def test_a_form_begins_after_the_reasoning(url, closing):
    answer = post(
        url,
        "chat/completions",
        messages=MESSAGES,
        chat_template=THINKING,
        guided_choice=["yes", "no"],
        max_tokens=400,
        logit_bias=closing,
        seed=4,
    ).json()
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        assert choice["message"]["content"] in ("yes", "no")
    assert choice["message"]["reasoning_content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_responses_and_messages_take_required_tools(client, url, closing):
    tool = {"type": "function", "name": "get_weather", "parameters": CITY}
    answer = client.responses.create(
        model="tiny",
        input="Hello!",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    [call] = [item for item in answer.output if item.type == "function_call"]
    validate(json.loads(call.arguments), CITY)
    tools = [{"name": "get_weather", "input_schema": CITY}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = uncut_message(url, tools=tools, tool_choice=choice)
        [*_, block] = [block for block in answer["content"] if block["type"] == "tool_use"]
        validate(block["input"], CITY)


def uncut_message(url, **fields):
    """An answer that ends by itself: a random model may fill all its tokens with white space."""
    for _ in range(12):
        answer = post(url, "messages", model="tiny", max_tokens=300, messages=MESSAGES, **fields)
        if answer.json()["stop_reason"] == "tool_use":
            return answer.json()
    raise AssertionError("no answer ended by itself")
