"""A stream says the same as a whole answer, byte for byte, whatever is asked."""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import support_tokenizer
from support_serving import RunningServer

COUNT = int(os.environ.get("GIRIH_STREAM_CASES", "20"))
WORDS = ["naïve", "世界", "😀", "👨‍👩‍👧", "مرحبا", "हिन्दी", "Ω", " two", "\n", "\u0000", "a", "🇮🇳"]
CLIENT = httpx.Client(timeout=60)  # one for all: making one takes longer than a request
CHAT_ROUTE = "/v1/chat/completions"


@pytest.fixture(scope="module", autouse=True)
def _closed_client():
    yield
    CLIENT.close()


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def server(request):
    tokenizer = getattr(support_tokenizer, request.param)()
    tokenizer.chat_templates = support_tokenizer.byte_level().chat_templates
    with RunningServer(tokenizer=tokenizer, eos=(1,), max_model_len=400) as running:
        yield running


def random_body(draw, server):
    """A request with random text, stop strings, limits and settings."""
    text = "".join(draw.choice(WORDS) for _ in range(draw.randint(1, 8)))
    body = {
        "max_tokens": draw.randint(1, 60),
        "temperature": draw.choice([0, 0.8]),
        "seed": draw.randint(0, 10**6),
    }
    body["n"] = draw.choice([1, 1, 2]) if body["temperature"] else 1
    if draw.random() < 0.3:
        body["include_stop_str_in_output"] = True
    if draw.random() < 0.3:
        body["min_tokens"] = draw.randint(0, body["max_tokens"])
    if draw.random() < 0.2:
        body["ignore_eos"] = True
    if draw.random() < 0.3:
        body["skip_special_tokens"] = False
    if draw.random() < 0.3:
        body["stream_interval"] = draw.randint(1, 9)
    if draw.random() < 0.5:
        return CHAT_ROUTE, {**body, "messages": [{"role": "user", "content": text}]}
    return "/v1/completions", {**body, "prompt": text}


def whole(server, route, body):
    answer = CLIENT.post(server.url + route, json=body)
    assert answer.status_code == 200, answer.text
    return [
        (
            choice["message"]["content"] if route == CHAT_ROUTE else choice["text"],
            choice["finish_reason"],
            choice["stop_reason"],
        )
        for choice in answer.json()["choices"]
    ]


def streamed(server, route, body):
    """Text, finish reason and stop reason per choice; every delta must be valid UTF-8."""
    found = [["", None, None] for _ in range(body["n"])]
    with CLIENT.stream("POST", server.url + route, json={**body, "stream": True}) as s:
        raw = b"".join(s.iter_bytes())
    events = raw.decode("utf-8").split("\n\n")
    lines = [line for line in events if line and not line.startswith(":")]  # keep-alive
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            text = choice["delta"].get("content") if route == CHAT_ROUTE else choice["text"]
            (text or "").encode("utf-8")
            entry = found[choice["index"]]
            assert entry[1] is None, "nothing follows a finish reason"
            entry[0] += text or ""
            entry[1] = choice["finish_reason"]
            entry[2] = choice.get("stop_reason")
    return [tuple(entry) for entry in found]


def with_stops(draw, body, texts):
    """Stop strings cut out of what the model says, across token borders, and others."""
    stops = []
    for _ in range(draw.randint(1, 4)):
        text = draw.choice(texts)
        start = draw.randrange(max(1, len(text)))
        stops.append(text[start : start + draw.randint(1, 5)] or draw.choice(WORDS))
    return {**body, "stop": stops}


def check(case):
    server, number = case
    draw = random.Random(number)
    route, body = random_body(draw, server)
    answers = whole(server, route, body)
    assert streamed(server, route, body) == answers
    body = with_stops(draw, body, [text for text, _, _ in answers])
    stopped = whole(server, route, body)
    assert streamed(server, route, body) == stopped
    for text, reason, matched in stopped:
        if body.get("min_tokens") or body.get("include_stop_str_in_output"):
            continue
        assert not any(stop in text for stop in body["stop"]), "a stop string leaked"
        assert (matched in body["stop"]) == (reason == "stop" and matched is not None)


def test_streams_are_whole_answers(server):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, [(server, number) for number in range(COUNT)]))
    server.wait_idle()
