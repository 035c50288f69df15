"""Token ids in, token ids out."""

import json

import httpx
import pytest

ROUTE = "/inference/v1/generate"
PROMPT = [5, 40, 50, 60]


def ask(server, **body):
    return server.post(ROUTE, **{"token_ids": PROMPT, **body})


def test_ids_are_those_of_a_completion(shared_server):
    sampling = {"max_tokens": 20, "temperature": 0, "logprobs": 1, "prompt_logprobs": 0}
    answer = ask(shared_server, sampling_params=sampling).json()
    completion = shared_server.post(
        "/v1/completions", prompt=PROMPT, max_tokens=20, temperature=0, return_token_ids=True
    ).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == completion["choices"][0]["token_ids"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 20
    named = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert named == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(PROMPT)


def test_a_stream_has_the_same_ids(shared_server):
    sampling = {"max_tokens": 20, "temperature": 0.7, "seed": 3, "n": 2}
    whole = ask(shared_server, sampling_params=sampling).json()
    body = {
        "token_ids": PROMPT,
        "sampling_params": sampling,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    found = [[], []]
    with httpx.stream("POST", shared_server.url + ROUTE, json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["token_ids"]
    assert found == [choice["token_ids"] for choice in whole["choices"]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 40


def test_stop_ids_end_the_output(shared_server):
    ids = ask(shared_server, sampling_params={"max_tokens": 12, "temperature": 0}).json()
    stop = ids["choices"][0]["token_ids"][6]
    sampling = {"max_tokens": 12, "temperature": 0, "stop_token_ids": [stop]}
    (choice,) = ask(shared_server, sampling_params=sampling).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"][-1] == stop


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [99999]}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"sampling_params": {"stop": ["x"]}}, "sampling_params"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"sampling_params": {"top_p": 2}}, "top_p"),
    ],
)
def test_bad_bodies_name_the_field(shared_server, body, param):
    answer = ask(shared_server, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_unknown_sampling_fields_are_named(shared_server):
    answer = ask(shared_server, sampling_params={"max_tokens": 1, "foo": 1}, bar=2)
    assert answer.headers["x-girih-ignored"] == "bar, sampling_params.foo"
