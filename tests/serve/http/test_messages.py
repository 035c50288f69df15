"""Anthropic's Messages API through the real `anthropic` client."""

import anthropic
import httpx
import pytest
from support_serving import MODEL

from girih.kernels.base.errors import RequestError
from girih.serve.http.anthropic.blocks import BlockBuilder, as_messages
from girih.serve.text.parsers.parts import ChatDelta, ToolCallDelta

HELLO = [{"role": "user", "content": "Hello 世界"}]


@pytest.fixture(scope="module")
def client(shared_server):
    with anthropic.Anthropic(base_url=shared_server.url, api_key="none", max_retries=0) as made:
        yield made


def ask(client, messages=HELLO, **options):
    options = {"max_tokens": 24, "extra_body": {"temperature": 0}, **options}
    return client.messages.create(model=MODEL, messages=messages, **options)


def chat_text(server, messages, **options):
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, **options}
    answer = server.post("/v1/chat/completions", **body).json()
    return answer["choices"][0]["message"]["content"]


def test_a_message_is_the_chat_answer(client, shared_server):
    answer = ask(client, system="Be kind.")
    plain = [{"role": "system", "content": "Be kind."}, *HELLO]
    assert answer.content[0].text == chat_text(shared_server, plain)
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        "max_tokens",
        None,
    )
    tokens = len(shared_server.tokenizer.encode(shared_server.tokenizer.render_chat(plain), False))
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == tokens
    assert usage.output_tokens == 24
    assert (
        client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be kind.").input_tokens
        == tokens
    )


def test_stop_sequences(client):
    text = ask(client).content[0].text
    stop = text[5:8]
    answer = ask(client, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


def test_a_streamed_message_is_the_whole_message(client):
    whole = ask(client)
    with client.messages.stream(
        model=MODEL, messages=HELLO, max_tokens=24, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 24


def test_events_come_in_their_order(client):
    kinds = [event.type for event in ask(client, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


@pytest.mark.parametrize("text", ["I say", "<", "im", "\n", ""])
def test_a_last_assistant_message_is_continued(client, shared_server, text):
    messages = [*HELLO, {"role": "assistant", "content": text}]
    tokenizer = shared_server.tokenizer
    tokens = len(tokenizer.encode(tokenizer.render_chat(HELLO) + text, False))
    assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens == tokens
    expected = chat_text(
        shared_server, messages, continue_final_message=True, add_generation_prompt=False
    )
    assert ask(client, messages).content[0].text == expected


def test_errors_have_the_shape_the_client_reads(client):
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="other", messages=HELLO, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, [])
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305"}]}, "tools"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"thinking": {"type": "deep"}}, "thinking"),
    ],
)
def test_bad_messages_name_the_field(shared_server, body, param):
    answer = shared_server.post("/v1/messages", **{"messages": HELLO, "max_tokens": 4, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("step", "begun"), [(0, []), (3, ["message_start", "content_block_start"])]
)
def test_a_failing_engine_is_told_in_the_stream(new_server, step, begun):
    server = new_server(fail_at={step: ValueError("boom")}, step_seconds=0.1)
    kinds = []
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match="generation failed"),
    ):
        for event in client.messages.create(
            model=MODEL, messages=HELLO, max_tokens=50, stream=True
        ):
            kinds.append(event.type)
    assert kinds[:2] == begun


def test_silence_is_filled_with_pings(new_server):
    server = new_server(step_seconds=0.2, serve={"keep_alive_seconds": 0.05})
    body = {"messages": HELLO, "max_tokens": 2, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=body) as answer:
        lines = list(answer.iter_lines())
    assert "event: ping" in lines


def test_blocks_become_messages():
    messages = as_messages(
        [{"type": "text", "text": "s"}],
        [
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "r"},
                    {"type": "text", "text": "more"},
                ],
            },
        ],
    )
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
    ]
    assert (messages[2]["content"], messages[2]["reasoning_content"]) == ("a", "t")
    assert messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert messages[3] == {"role": "tool", "tool_call_id": "1", "content": "r"}
    with pytest.raises(RequestError, match="block of type 'document'"):
        as_messages(None, [{"role": "user", "content": [{"type": "document"}]}])


def test_blocks_of_thinking_text_and_tools():
    builder = BlockBuilder()
    news = [
        ChatDelta(reasoning="th"),
        ChatDelta(reasoning="ink", content="Say."),
        ChatDelta(tool_calls=[ToolCallDelta(0, "c0", "f", '{"a"')]),
        ChatDelta(tool_calls=[ToolCallDelta(0, arguments=": 1}"), ToolCallDelta(1, "c1", "g")]),
    ]
    events = [event for delta in news for event in builder.push(delta)]
    events += builder.finish()
    assert builder.blocks == [
        {"type": "thinking", "thinking": "think", "signature": ""},
        {"type": "text", "text": "Say."},
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "c1", "name": "g", "input": {}},
    ]
    starts = [fields for name, fields in events if name == "content_block_start"]
    assert starts[0]["content_block"]["thinking"] == ""
    assert [name for name, _ in events].count("content_block_stop") == 4


def test_an_input_that_nests_without_end_stays_text():
    builder, arguments = BlockBuilder(), '{"a":' * 100_000
    parts = ChatDelta(tool_calls=[ToolCallDelta(0, "c0", "f", arguments)])
    events = [*builder.push(parts), *builder.finish()]
    assert builder.blocks[0]["input"] == {"arguments": arguments}
    assert events[-1][0] == "content_block_stop"
