"""The real `openai` client against the real application on a real socket."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import support_tokenizer
from support_serving import MODEL, RunningServer

from girih.serve.http.anthropic import routes as messages_routes
from girih.serve.http.generation import chat_job
from girih.serve.http.generation.chat_job import ChatJob
from girih.serve.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hello, 世界 😀"}]


@pytest.fixture(scope="module")
def client(shared_server):
    with openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def complete(client, prompt="one two three", **options):
    return client.completions.create(model=MODEL, prompt=prompt, temperature=0, **options)


def streamed(client, **options):
    """Text, finish reason and usage of a streamed completion."""
    text, reason, usage = "", None, None
    for chunk in complete(client, stream=True, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
    return text, reason, usage


def test_chat_whole(client, shared_server):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    text = shared_server.tokenizer.render_chat(MESSAGES)
    assert answer.usage.prompt_tokens == len(shared_server.tokenizer.encode(text))
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_chat_streamed_is_chat_whole(client):
    options = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 40}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 40


def test_completion_streamed_is_completion_whole(client):
    for seed in range(6):
        prompt = [seed + 5, 40, 50, 60]
        whole = complete(client, prompt=prompt, max_tokens=30)
        text, reason, _ = streamed(client, prompt=prompt, max_tokens=30)
        assert (text, reason) == (whole.choices[0].text, whole.choices[0].finish_reason)


def test_max_tokens_is_16_for_completions_and_the_room_left_for_chat(client):
    assert complete(client).usage.completion_tokens == 16
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_stop_strings_end_the_text_and_are_never_shown(client):
    full = complete(client, max_tokens=40).choices[0].text
    for start, size in ((4, 3), (10, 2), (17, 5), (21, 1)):
        stop = full[start : start + size]
        expected = full[: full.index(stop)]
        whole = complete(client, max_tokens=40, stop=[stop]).choices[0]
        assert (whole.text, whole.finish_reason) == (expected, "stop")
        assert whole.stop_reason == stop
        seen = ""
        for chunk in complete(client, max_tokens=40, stop=[stop], stream=True):
            seen += chunk.choices[0].text
            assert expected.startswith(seen)
        assert seen == expected


def test_include_stop_and_min_tokens(client):
    full = complete(client, max_tokens=40).choices[0].text
    stop = full[8:11]
    kept = complete(
        client, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == full[: full.index(stop) + 3]
    late = complete(client, max_tokens=40, stop=stop, extra_body={"min_tokens": 40})
    assert late.choices[0].text == full
    assert late.usage.completion_tokens == 40


def test_stop_token_ids_end_the_text_before_the_token(client, shared_server):
    full = complete(client, max_tokens=20, extra_body={"return_token_ids": True}).choices[0]
    stop_id = full.token_ids[9]
    first = full.token_ids.index(stop_id)
    cut = complete(
        client, max_tokens=20, extra_body={"stop_token_ids": [stop_id], "return_token_ids": True}
    ).choices[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop_id)
    assert cut.token_ids == full.token_ids[: first + 1]
    assert cut.text == shared_server.tokenizer.decode(full.token_ids[:first])


def test_many_prompts_and_many_choices(client):
    answer = client.completions.create(
        model=MODEL, prompt=["one", "two two"], n=3, temperature=0.5, max_tokens=8
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    alone = complete(client, prompt="two two", max_tokens=8).choices[0].text
    assert {choice.text for choice in answer.choices[3:]} == {alone}
    assert answer.usage.completion_tokens == 48
    texts = [""] * 6
    for chunk in client.completions.create(
        model=MODEL, prompt=["one", "two two"], n=3, temperature=0.5, max_tokens=8, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]


def test_chat_logprobs(client, shared_server):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=1
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    joined = b"".join(bytes(entry.bytes) for entry in content)
    assert joined.decode(errors="replace").startswith(answer.choices[0].message.content[:2])
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)
    assert all(entry.logprob == -0.5 for entry in content)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_an_answer_that_ends_inside_a_character_ends_before_it(kind):
    tokenizer = getattr(support_tokenizer, kind)()
    ids = tokenizer.encode("é🛸", add_special_tokens=False)
    server = RunningServer(
        tokenizer=tokenizer, next_token=lambda row: ids[(len(row) - 1) % len(ids)]
    )
    with server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        options = {"model": MODEL, "prompt": [0], "max_tokens": len(ids) - 1}
        whole = client.completions.create(**options)
        assert whole.choices[0].text.strip() == "é"
        assert whole.usage.completion_tokens == len(ids) - 1
        chunks = list(client.completions.create(**options, stream=True))
        assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
        assert chunks[-1].choices[0].finish_reason == "length"


def test_streamed_logprobs_are_those_of_the_whole_answer():
    tokenizer = support_tokenizer.byte_level()
    ids = tokenizer.encode("é😀b", add_special_tokens=False)  # characters of several tokens
    server = RunningServer(
        tokenizer=tokenizer, next_token=lambda row: ids[len(row) % len(ids)], step_seconds=0.01
    )
    with server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "logprobs": True}
        whole = client.chat.completions.create(**options).choices[0]
        chunks = list(client.chat.completions.create(stream=True, **options))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].logprobs]
    assert any(not part.delta.content for part in parts)
    assert [entry for part in parts for entry in part.logprobs.content] == whole.logprobs.content
    assert len(whole.logprobs.content) == 16


def test_completion_logprobs_and_echo(client, shared_server):
    prompt = "one two"
    answer = complete(client, prompt=prompt, max_tokens=4, logprobs=1, echo=True)
    choice = answer.choices[0]
    count = answer.usage.prompt_tokens + 4
    logprobs = choice.logprobs
    lengths = {len(getattr(logprobs, name)) for name in logprobs.model_fields_set}
    assert lengths == {count}
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert choice.text.startswith(prompt)
    assert_offsets_fit(choice)


def assert_offsets_fit(choice):
    """Every token that is whole characters stands in the text where its offset says."""
    logprobs = choice.logprobs
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    named = list(zip(logprobs.tokens, logprobs.text_offset, strict=True))
    for token, offset in named:
        if not token.startswith(("bytes:", "<|")):
            assert choice.text[offset:].startswith(token), (token, offset, choice.text)
    assert not all(token.startswith("bytes:") for token, _ in named)


def test_text_offsets_count_characters_not_pieces_of_them(client, shared_server):
    prompts = ["naïve 😀 你好 <|im_end|> x", shared_server.tokenizer.encode("你 a 😀 b")]
    for prompt in prompts:
        for echo in (False, True):
            answer = complete(client, prompt=prompt, max_tokens=60, logprobs=1, echo=echo)
            assert_offsets_fit(answer.choices[0])
    texts, offsets = "", []
    options = {"prompt": prompts[0], "max_tokens": 60, "logprobs": 1}
    for chunk in complete(client, stream=True, **options):
        texts += chunk.choices[0].text
        offsets += chunk.choices[0].logprobs.text_offset
    whole = complete(client, **options).choices[0]
    assert (texts, offsets) == (whole.text, whole.logprobs.text_offset)


def test_echo_without_new_tokens_scores_the_prompt(client):
    answer = complete(client, prompt="one two", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "one two"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens
    plain = complete(client, prompt="one two", max_tokens=0, echo=True).choices[0]
    assert (plain.text, plain.logprobs) == ("one two", None)
    unechoed = complete(client, prompt="one two", max_tokens=0, extra_body={"prompt_logprobs": 0})
    assert unechoed.choices[0].text == ""
    assert len(unechoed.choices[0].prompt_logprobs) == answer.usage.prompt_tokens
    text = "".join(
        chunk.choices[0].text
        for chunk in complete(client, prompt="one two", max_tokens=0, echo=True, stream=True)
    )
    assert text == "one two"


def test_a_prompt_as_long_as_the_context_is_scored(client):
    prompt = [5 + i % 90 for i in range(256)]
    answer = complete(client, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
    assert answer.usage.prompt_tokens == 256
    assert answer.usage.completion_tokens == 0
    logprobs = answer.choices[0].logprobs.token_logprobs
    assert logprobs == [None, *[-0.5] * 255]
    cut = complete(
        client, prompt=[5, *prompt], max_tokens=0, echo=True,
        extra_body={"truncate_prompt_tokens": -1},
    )  # fmt: skip
    assert cut.usage.prompt_tokens == 256
    for options in ({"prompt": [5, *prompt], "max_tokens": 0}, {"prompt": prompt, "max_tokens": 1}):
        with pytest.raises(openai.BadRequestError, match=r"at most 25[56] tokens") as caught:
            complete(client, echo=True, **options)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("temperature", [0, 1e-46])
def test_several_greedy_answers_are_equal(client, temperature):
    options = {"model": MODEL, "n": 3, "temperature": temperature, "max_tokens": 8}
    alone = complete(client, prompt="two two", max_tokens=8).choices[0].text
    answer = client.completions.create(prompt="two two", **options)
    assert [choice.text for choice in answer.choices] == [alone] * 3
    assert answer.usage.completion_tokens == 24
    chat = client.chat.completions.create(messages=MESSAGES, **options)
    assert len({choice.message.content for choice in chat.choices}) == 1
    assert [choice.index for choice in chat.choices] == [0, 1, 2]


def test_prompt_logprobs(client):
    answer = complete(client, prompt="one two", max_tokens=2, extra_body={"prompt_logprobs": 1})
    entries = answer.choices[0].prompt_logprobs
    assert entries[0] is None
    assert all(next(iter(entry.values()))["logprob"] == -0.5 for entry in entries[1:])


def test_cached_tokens_are_reported(client):
    prompt = list(range(100, 164))
    complete(client, prompt=prompt, max_tokens=1)
    again = complete(client, prompt=prompt, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= 32


def test_continuous_usage(client):
    chunks = list(
        complete(
            client,
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}),
        ("/v1/completions", {"prompt": ["one", "two"]}),
        ("/inference/v1/generate", {"token_ids": [1, 2, 3]}),
    ],
)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": True}])
def test_usage_is_null_until_the_last_chunk_when_it_is_asked_for(
    shared_server, path, body, options
):
    sampling = {"max_tokens": 3, "ignore_eos": True}
    fields = {"sampling_params": sampling} if "token_ids" in body else sampling
    asked = {**body, **fields, "stream": True, "stream_options": options}
    *chunks, last = [json.loads(data) for _, data in events(shared_server, path, asked)[:-1]]
    if not options:
        assert all("usage" not in chunk for chunk in [*chunks, last])
        return
    assert {json.dumps(chunk["usage"]) for chunk in chunks} == {"null"}
    assert (last["choices"], last["usage"]["completion_tokens"] % 3) == ([], 0)


def events(server, path, body):
    """(Name, data) of each event of a stream, and ("", "") for each comment."""
    found = []
    with httpx.stream("POST", server.url + path, json=body, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        for block in "".join(answer.iter_text()).split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            found.append((fields.get("event", ""), fields.get("data", "")))
    return found


ROLE = '"delta":{"role":"assistant"'
STREAMS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": MESSAGES, "n": 2, "seed": 1}, ROLE),
    "/v1/messages": ({"messages": MESSAGES}, '"type":"message_start"'),
    "/v1/completions": ({"prompt": "one"}, '"choices":'),
    "/inference/v1/generate": ({"token_ids": [1, 2, 3]}, '"choices":'),
}


@pytest.mark.parametrize("path", STREAMS)
def test_nothing_but_comments_comes_before_the_first_token(new_server, path):
    """Load generators take the first event for the first token."""
    body, opening = STREAMS[path]
    server = new_server(step_seconds=0.5, serve={"keep_alive_seconds": 0.05})
    found = [data for _, data in events(server, path, {**body, "max_tokens": 2, "stream": True})]
    first = next(place for place, data in enumerate(found) if data)
    assert first > 1  # comments, while the prompt was taken in
    assert opening in found[first]
    if "chat" in path:  # a role, and right behind it a token, for each choice
        assert [ROLE in data for data in found if data][:4] == [True, False, True, False]
    if "messages" in path:
        assert json.loads(found[first])["message"]["usage"]["output_tokens"] == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_the_opening_is_written_with_the_first_token(new_server, path):
    body, opening = STREAMS[path]
    server = new_server(step_seconds=0.2)
    asked = {**body, "max_tokens": 2, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + path, json=asked, timeout=30) as answer:
        writes = [raw.decode() for raw in answer.iter_raw()]
    opened = [raw for raw in writes if opening in raw]
    assert len(opened) == body.get("n", 1)
    assert all(raw.count("data: ") >= 2 for raw in opened)


def test_a_message_starts_with_what_came_from_the_cache(new_server):
    server = new_server()
    long = [{"role": "user", "content": "word " * 30}]
    body = {"messages": long, "max_tokens": 2, "stream": True}
    starts = [json.loads(events(server, "/v1/messages", body)[0][1])["message"] for _ in "12"]
    first, again = [start["usage"] for start in starts]
    assert (first["cache_read_input_tokens"], again["cache_read_input_tokens"] > 0) == (0, True)
    assert first["input_tokens"] == again["input_tokens"] + again["cache_read_input_tokens"]


def test_stream_interval_groups_tokens(client):
    chunks = list(
        complete(
            client,
            max_tokens=12,
            stream=True,
            extra_body={"stream_interval": 5, "return_token_ids": True},
        )
    )
    sizes = [len(chunk.choices[0].token_ids) for chunk in chunks]
    assert sum(sizes) == 12
    assert all(size >= 5 for size in sizes[:-1])


def test_many_clients_at_once_get_what_they_get_alone(client):
    prompts = [[index + 1, 7, 9] for index in range(24)]
    alone = [complete(client, prompt=prompt, max_tokens=12).choices[0].text for prompt in prompts]
    with ThreadPoolExecutor(24) as pool:
        together = list(
            pool.map(lambda prompt: streamed(client, prompt=prompt, max_tokens=12)[0], prompts)
        )
    assert together == alone


def test_unknown_fields_are_named_in_a_header(shared_server):
    answer = shared_server.post(
        "/v1/completions", model=MODEL, prompt="a", max_tokens=1, foo=1, user="me"
    )
    assert answer.status_code == 200
    assert answer.headers["x-girih-ignored"] == "foo, user"


def test_events_are_well_formed(shared_server):
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{shared_server.url}/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: ")) for line in lines[:-1])


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("streams", [False, True])
def test_damaged_arguments_in_the_history_are_told_in_a_header(shared_server, path, streams):
    hello = {"role": "user", "content": "Hi"}

    def answer(arguments):
        body = {"model": MODEL, "max_tokens": 2, "messages": [hello]}
        function = {"name": "f", "arguments": arguments}
        if path == "messages":
            call = {"type": "tool_use", "id": "1", "name": "f", "input": arguments}
            body["messages"] = [hello, {"role": "assistant", "content": [call]}, hello]
        elif path == "responses":
            call = {"type": "function_call", "call_id": "1", **function}
            body = {"input": [hello, call, hello], "max_output_tokens": 2}
        else:
            call = {"id": "1", "type": "function", "function": function}
            body["messages"] = [hello, {"role": "assistant", "tool_calls": [call]}, hello]
        got = shared_server.post(f"/v1/{path}", **body, stream=streams)
        assert got.status_code == 200, got.text
        return got.headers.get("x-girih-warnings")

    place = "messages[1].tool_calls[0].function.arguments"
    assert answer('{"city": "Os') == f"{place} is not a JSON object"
    assert answer('{"city": "Oslo"}' if path != "messages" else {"city": "Oslo"}) is None


@pytest.mark.parametrize("trusts", [False, True])
def test_a_request_names_one_of_the_models_templates(new_server, trusts):
    tokenizer = support_tokenizer.byte_level()
    for name in ("tool_use", "rag"):
        tokenizer.chat_templates[name] = ChatTemplate(name + "{{ tools | tojson }} <tool_call>")
    server = new_server(tokenizer=tokenizer, serve={"trust_request_chat_template": trusts})
    tools = [{"type": "function", "function": {"name": "f"}}]
    shown = "[" + json.dumps(tools[0]) + "] <tool_call>"

    def prompt(**fields):
        asked = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        tokens = server.post("/tokenize", **asked).json()
        answer = server.post("/v1/chat/completions", **asked, max_tokens=1, return_token_ids=True)
        assert answer.json().get("prompt_token_ids") == tokens.get("tokens"), answer.text
        return tokenizer.decode(tokens["tokens"]) if "tokens" in tokens else tokens["error"]

    assert prompt(tools=tools) == "tool_use" + shown
    assert prompt(tools=tools, chat_template="rag") == "rag" + shown
    assert prompt(chat_template="rag") == "ragnull <tool_call>"
    assert prompt(chat_template="default") == prompt()
    own = prompt(chat_template="own {{ messages[0].content }}")
    if trusts:
        assert own == "own Hi"
    else:
        assert own["param"] == "chat_template"
        assert "no templates other than default, rag, tool_use from requests" in own["message"]


THOUGHTS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>"}]


def test_reasoning_is_counted_once_however_often_usage_is_told(new_server, monkeypatch):
    server = new_server(serve={"reasoning_parser": "qwen3"}, eos=(), step_seconds=0.02)
    counted = []
    count = ChatJob.num_reasoning_tokens
    monkeypatch.setattr(
        ChatJob, "num_reasoning_tokens", lambda job: counted.append(count(job)) or counted[-1]
    )
    body = {
        "messages": THOUGHTS,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    lines = server.post("/v1/chat/completions", **body).text.split("\n\n")
    usages = [json.loads(line[6:])["usage"] for line in lines if line.startswith("data: {")]
    assert len(usages) > 3
    assert len(counted) == 1
    details = usages.pop()["completion_tokens_details"]
    assert details == {"reasoning_tokens": counted[0]}
    assert counted[0] > 0
    assert all("completion_tokens_details" not in usage for usage in usages)


def test_reasoning_has_both_its_names_or_is_left_out(new_server):
    server = new_server(serve={"reasoning_parser": "qwen3"}, eos=())
    body = {
        "messages": THOUGHTS,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": 12,
    }

    def messages(**fields):
        whole = server.post("/v1/chat/completions", **body, **fields).json()
        lines = server.post("/v1/chat/completions", **body, stream=True, **fields).text
        events = [json.loads(x[6:]) for x in lines.split("\n\n") if x.startswith("data: {")]
        streamed = {}
        for event in events:
            for name, text in event["choices"][0]["delta"].items():
                streamed[name] = streamed.get(name, "") + text
        return whole["choices"][0]["message"], streamed, whole["usage"]

    for message in messages()[:2]:
        assert message["reasoning"] == message["reasoning_content"]
        assert message["reasoning"]
    *hidden, usage = messages(include_reasoning=False)
    assert not any("reasoning" in name for message in hidden for name in message)
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/v1/chat/completions", {"type": "function", "function": {"name": "f"}}),
        ("/v1/messages/count_tokens", {"name": "f"}),
    ],
)
def test_requests_with_tools_are_planned_in_another_thread(new_server, monkeypatch, path, tool):
    server, threads = new_server(serve={"tool_parser": "hermes"}), []
    for module in (chat_job, messages_routes):

        def render(*args, _render=module.render_messages, **options):
            threads.append(threading.current_thread())
            return _render(*args, **options)

        monkeypatch.setattr(module, "render_messages", render)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert server.post(path, **body).status_code == 200
    assert server.post(path, **body, tools=[tool]).status_code == 200
    short, with_tools = threads
    assert short is server._thread
    assert with_tools is not server._thread
