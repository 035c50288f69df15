"""The Responses API through the real `openai` client: items, events, storage."""

import httpx
import openai
import pytest
import support_tokenizer
from support_serving import MODEL, RunningServer

from girih.kernels.base.errors import RequestError
from girih.serve.http.base.errors import ApiError
from girih.serve.http.responses.items import as_messages
from girih.serve.http.responses.output import OutputBuilder
from girih.serve.http.responses.store import ResponseStore, StoredResponse
from girih.serve.text.parsers.parts import ChatDelta, ToolCallDelta


@pytest.fixture(scope="module")
def client(shared_server):
    with openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def respond(client, text="Hello 世界", **options):
    options.setdefault("max_output_tokens", 24)
    return client.responses.create(model=MODEL, input=text, temperature=0, **options)


def test_a_response_is_the_chat_answer(client):
    answer = respond(client, instructions="Be kind.", metadata={"a": "b"})
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hello 世界"},
        ],
        temperature=0,
        max_tokens=24,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == 24
    assert answer.usage.total_tokens == answer.usage.input_tokens + 24
    assert (answer.metadata, answer.instructions) == ({"a": "b"}, "Be kind.")


def test_a_stop_completes_a_response(client):
    text = respond(client).output_text
    stopped = respond(client, extra_body={"stop": [text[6:9]]})
    assert stopped.status == "completed"
    assert stopped.incomplete_details is None
    assert stopped.output_text == text[: text.index(text[6:9])]


def test_streamed_events_build_the_whole_response(client):
    whole = respond(client)
    with client.responses.stream(
        model=MODEL, input="Hello 世界", temperature=0, max_output_tokens=24
    ) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    final = events[-1].response
    assert deltas == final.output_text == whole.output_text
    assert final.usage.output_tokens == 24


def test_a_conversation_goes_on_from_a_stored_response(client, shared_server):
    first = respond(client, "one", instructions="first only")
    second = respond(client, "two", previous_response_id=first.id)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "two"},
    ]
    rendered = shared_server.tokenizer.render_chat(messages)
    assert second.usage.input_tokens == len(shared_server.tokenizer.encode(rendered, False))
    spelled = respond(client, messages)
    assert spelled.output_text == second.output_text


def test_stored_responses_are_found_and_deleted(client):
    made = respond(client, "keep me")
    assert client.responses.retrieve(made.id).output_text == made.output_text
    (item,) = client.responses.input_items.list(made.id).data
    assert item.content[0].text == "keep me"
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="stored"):
            call(made.id)
    loose = respond(client, store=False)
    with pytest.raises(openai.NotFoundError):
        respond(client, previous_response_id=loose.id)


def test_input_items_come_in_pages(client, shared_server):
    made = respond(client, [{"role": "user", "content": text} for text in "abc"])
    listed = client.responses.input_items.list(made.id, limit=2)
    assert [item.content for item in listed.data] == ["c", "b"]
    assert [item.content for item in listed] == ["c", "b", "a"]  # the client asks for more
    first = client.responses.input_items.list(made.id, order="asc", limit=1)
    assert first.data[0].content == "a"
    for query in ("limit=0", "limit=x", "order=up", "after=none"):
        answer = shared_server.get(f"/v1/responses/{made.id}/input_items?{query}")
        assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_logprobs_come_with_the_text(client):
    answer = respond(client, include=["message.output_text.logprobs"], max_output_tokens=5)
    entries = answer.output[0].content[0].logprobs
    assert len(entries) == 5
    assert all(entry.logprob == -0.5 for entry in entries)


def test_streamed_logprobs_are_all_there_although_not_every_token_makes_text():
    tokenizer = support_tokenizer.byte_level()
    ids = tokenizer.encode("é😀b", add_special_tokens=False)  # characters of several tokens
    assert len(ids) == 5
    server = RunningServer(
        tokenizer=tokenizer, next_token=lambda row: ids[len(row) % 5], step_seconds=0.01
    )
    options = {
        "max_output_tokens": 16,
        "include": ["message.output_text.logprobs"],
        "extra_body": {"stop": ["bé!"]},  # holds text back
    }
    with server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        whole = respond(client, **options).output[0].content[0]
        events = list(respond(client, stream=True, **options))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    final = events[-1].response.output[0].content[0]
    assert final.text == done.text == whole.text
    assert len(whole.logprobs) == 16
    assert final.logprobs == whole.logprobs
    assert [entry.token for entry in done.logprobs] == [entry.token for entry in whole.logprobs]
    begun = [entry.token for event in deltas for entry in event.logprobs]
    assert begun == [entry.token for entry in whole.logprobs][: len(begun)]
    assert len(deltas) < len(begun)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "background": True, "stream": True}, "background"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "truncation": "half"}, "truncation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "temperature": -1}, "temperature"),
    ],
)
def test_bad_responses_name_the_field(shared_server, body, param):
    answer = shared_server.post("/v1/responses", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_turns_with_one_request_id_are_all_kept(shared_server):
    headers = {"x-request-id": "one-session"}
    first, second, third = (
        httpx.post(
            f"{shared_server.url}/v1/responses",
            json={"input": text, "max_output_tokens": 4},
            headers=headers,
        ).json()
        for text in ("a", "b", "c")
    )
    assert first["id"] == "resp_one-session"
    for response in (first, second, third):
        kept = shared_server.get(f"/v1/responses/{response['id']}").json()
        assert kept["output"] == response["output"]
    assert len({first["id"], second["id"], third["id"]}) == 3


# ---- in the background ----


@pytest.fixture(scope="module")
def slow():
    with RunningServer(step_seconds=0.02, serve={"admin_key": "root"}) as server:
        yield server


@pytest.fixture(scope="module")
def slow_client(slow):
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_response_in_the_background_is_answered_at_once_and_found_later(slow, slow_client):
    begun = respond(slow_client, background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    with pytest.raises(openai.BadRequestError, match="is in_progress; only one"):
        respond(slow_client, previous_response_id=begun.id)
    assert slow_client.responses.retrieve(begun.id).status == "in_progress"
    find = slow_client.responses.retrieve
    slow.wait_for(lambda: find(begun.id).status != "in_progress")
    assert find(begun.id).output_text == respond(slow_client).output_text
    assert find(begun.id).usage.output_tokens == 24
    assert slow_client.responses.cancel(begun.id).status == "incomplete"  # it was over
    assert respond(slow_client, "And?", previous_response_id=begun.id).output_text


def test_a_response_in_the_background_is_cancelled(slow, slow_client):
    begun = respond(slow_client, background=True, max_output_tokens=200)
    slow.wait_for(lambda: slow.core.scheduler.running)
    cancelled = slow_client.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.incomplete_details) == ("cancelled", None)
    assert slow_client.responses.retrieve(begun.id).status == "cancelled"
    slow.wait_idle()
    other = respond(slow_client, max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="does not run in the background"):
        slow_client.responses.cancel(other.id)
    with pytest.raises(openai.NotFoundError):
        slow_client.responses.cancel("resp_nothing")


def test_deleting_a_response_in_the_background_ends_it(slow, slow_client):
    begun = respond(slow_client, background=True, max_output_tokens=200)
    slow_client.responses.delete(begun.id)
    slow.wait_idle()
    with pytest.raises(openai.NotFoundError):
        slow_client.responses.retrieve(begun.id)
    assert len(slow.server.app.state.responses.running) == 0


def test_as_many_responses_run_in_the_background_as_can_be_kept(new_server):
    server = new_server(step_seconds=0.02, serve={"max_stored_responses": 2})
    body = {"input": "x", "background": True, "max_output_tokens": 200}
    begun = [server.post("/v1/responses", **body).json() for _ in range(2)]
    refused = server.post("/v1/responses", **body)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "serve.max_stored_responses is 2" in refused.json()["error"]["message"]
    server.post(f"/v1/responses/{begun[0]['id']}/cancel")
    assert server.post("/v1/responses", **body).status_code == 200


def test_a_response_in_the_background_tells_that_it_failed(new_server):
    server = new_server(fail_at={3: ValueError("broken")})
    begun = server.post("/v1/responses", input="x", background=True, max_output_tokens=50).json()
    where = f"/v1/responses/{begun['id']}"
    server.wait_for(lambda: server.get(where).json()["status"] == "failed")
    assert server.get(where).json()["error"]["code"] == "server_error"


def test_what_has_no_effect_is_named(shared_server):
    answer = shared_server.post(
        "/v1/responses",
        input="x",
        max_output_tokens=1,
        user="me",
        include=["reasoning.encrypted_content"],
        reasoning={"generate_summary": "auto"},
    )
    ignored = "include.reasoning.encrypted_content, reasoning.generate_summary, user"
    assert answer.headers["x-girih-ignored"] == ignored


def test_a_failing_engine_fails_the_stream(new_server):
    server = new_server(fail_at={3: ValueError("boom")}, eos=())
    body = {"input": "x", "stream": True, "max_output_tokens": 50}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("event: ")]
    assert lines[0] == "event: response.created"
    assert lines[-1] == "event: response.failed"


def test_items_become_messages():
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "o"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "message", "role": "assistant", "content": "a"},
    ]
    messages = as_messages(items)
    assert [m["role"] for m in messages] == ["developer", "user", "assistant", "tool", "assistant"]
    assert messages[2]["reasoning_content"] == "r"
    assert [call["function"]["name"] for call in messages[2]["tool_calls"]] == ["f", "g"]
    assert messages[3] == {"role": "tool", "tool_call_id": "1", "content": "o"}
    assert messages[4] == {"role": "assistant", "content": "a", "reasoning_content": "s"}
    with pytest.raises(RequestError, match="text parts only"):
        as_messages([{"role": "user", "content": [{"type": "input_file"}]}])


def test_items_of_reasoning_text_and_calls():
    builder = OutputBuilder()
    news = [
        ChatDelta(reasoning="th"),
        ChatDelta(reasoning="ink", content="Say"),
        ChatDelta(content="."),
        ChatDelta(tool_calls=[ToolCallDelta(0, "c0", "f", '{"a"')]),
        ChatDelta(tool_calls=[ToolCallDelta(0, arguments=": 1}"), ToolCallDelta(1, "c1", "g")]),
    ]
    events = [event for delta in news for event in builder.push(delta, [])]
    events += builder.finish("completed")
    kinds = [item["type"] for item in builder.items]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert {item["status"] for item in builder.items} == {"completed"}
    assert builder.items[2]["arguments"] == '{"a": 1}'
    assert [fields["output_index"] for name, fields in events if name == "output_item.added"] == [
        0,
        1,
        2,
        3,
    ]
    added = next(fields for name, fields in events if name == "output_item.added")
    assert added["item"]["content"] == []
    message = builder.as_message()
    assert (message["content"], message["reasoning_content"]) == ("Say.", "think")
    assert [call["id"] for call in message["tool_calls"]] == ["c0", "c1"]


@pytest.mark.parametrize(
    ("news", "begun"),
    [
        ([ChatDelta(), ChatDelta(content="a"), ChatDelta(content="b"), ChatDelta()], [2, 1]),
        ([ChatDelta(reasoning="r"), ChatDelta(content="a")], [2]),
        ([ChatDelta(content="a"), ChatDelta(), ChatDelta(tool_calls=[ToolCallDelta(0)])], [1]),
        ([ChatDelta(), ChatDelta()], []),
    ],
)
def test_every_token_s_logprobs_are_in_the_message_however_the_answer_is_cut(news, begun):
    entries = [{"token": str(index)} for index in range(len(news))]
    streamed, whole, merged = OutputBuilder(), OutputBuilder(), ChatDelta()
    events = []
    for delta, entry in zip(news, entries, strict=True):
        events += streamed.push(delta, [entry])
        merged.merge(delta)
    events += streamed.finish("completed")
    list(whole.push(merged, entries))
    list(whole.finish("completed"))
    assert [len(e["logprobs"]) for name, e in events if name == "output_text.delta"] == begun
    for builder in (streamed, whole):
        [message] = [item for item in builder.items if item["type"] == "message"]
        assert message["content"][0]["logprobs"] == entries


def stored(name, size=10):
    return StoredResponse({"id": name, "text": "x" * size}, [], [])


def test_the_store_forgets_what_was_not_used_for_longest():
    store = ResponseStore(max_responses=2, max_bytes=10_000)
    store.put(stored("a"))
    store.put(stored("b"))
    store.get("a")
    store.put(stored("c"))
    assert store.get("a").body["id"] == "a"
    with pytest.raises(ApiError, match="'b'"):
        store.get("b")
    store.put(stored("a", 20))
    assert len(store) == 2


def test_the_store_is_bounded_in_bytes():
    store = ResponseStore(max_responses=100, max_bytes=1000)
    for index in range(20):
        store.put(stored(str(index), 150))
    assert len(store) == 5
    store.put(stored("huge", 5000))
    assert len(store) == 0
