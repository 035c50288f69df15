"""The real clients against the real server and a real (tiny, random) model."""

import asyncio

import anthropic
import openai
import pytest
import torch
from support_models import hf_config, hf_model

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "Hello, 世界 😀"}]
OPTIONS = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def client(tiny_server):
    with openai.OpenAI(base_url=f"{tiny_server}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def answer(client):
    return client.chat.completions.create(**OPTIONS)


def run_async(tiny_server, work):
    async def run():
        options = {"base_url": f"{tiny_server}/v1", "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as made:
            return await work(made)

    return asyncio.run(run())


def middle_of(text):
    """A stop string: the helpers of the client refuse an answer that ends by its length."""
    return text[len(text) // 2 : len(text) // 2 + 3]


def test_the_model_is_listed_with_defaults_and_limits(client):
    (card,) = client.models.list().data
    details = client.models.retrieve(card.id)
    assert (card.id, details.max_model_len) == (MODEL, 512)
    assert details.default_sampling["temperature"] == 1.0
    assert details.limits["logprobs"] == 20


def test_the_same_chat_from_every_kind_of_client(client, answer, tiny_server):
    expected = answer.choices[0].message.content
    assert expected

    async def ask(made):
        whole, parts = await asyncio.gather(
            made.chat.completions.create(**OPTIONS),
            made.chat.completions.create(**OPTIONS, stream=True),
        )
        text = "".join([part.choices[0].delta.content or "" async for part in parts])
        return whole.choices[0].message.content, text

    assert run_async(tiny_server, ask) == (expected, expected)
    stop = middle_of(expected)
    with client.chat.completions.stream(**OPTIONS, stop=[stop]) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert deltas == final.choices[0].message.content == expected[: expected.index(stop)]
    assert final.choices[0].finish_reason == "stop"


def test_responses_are_the_same_chat(client, answer, tiny_server):
    options = {
        "model": MODEL,
        "input": MESSAGES[0]["content"],
        "max_output_tokens": 24,
        "temperature": 0,
    }
    expected = answer.choices[0].message.content
    made = client.responses.create(**options)
    assert made.output_text == expected
    assert client.responses.retrieve(made.id).output_text == expected
    stop = middle_of(expected)
    with client.responses.stream(**options, extra_body={"stop": [stop]}) as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == expected[: expected.index(stop)]

    async def ask(asynchronous):
        return await asynchronous.responses.create(**options)

    assert run_async(tiny_server, ask).output_text == expected


def test_messages_are_the_same_chat(answer, tiny_server):
    expected = answer.choices[0].message.content
    options = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 24,
        "extra_body": {"temperature": 0},
    }
    settings = {"base_url": tiny_server, "api_key": "none", "max_retries": 0}
    with anthropic.Anthropic(**settings) as made:
        assert made.messages.create(**options).content[0].text == expected
        with made.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == expected

    async def ask():
        async with anthropic.AsyncAnthropic(**settings) as asynchronous:
            return await asynchronous.messages.create(**options)

    assert asyncio.run(ask()).content[0].text == expected


def test_errors_become_the_exceptions_of_the_client(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**OPTIONS, "temperature": -1})
    assert (caught.value.param, caught.value.code) == ("temperature", None)
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**{**OPTIONS, "model": "other"})
    assert caught.value.code == "model_not_found"
    long = [{"role": "user", "content": "a word " * 5000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**OPTIONS, "messages": long})
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")


def test_the_request_id_is_the_clients(client):
    raw = client.chat.completions.with_raw_response.create(
        **OPTIONS, extra_headers={"x-request-id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse().id == "chatcmpl-mine-7"


def test_logprobs_are_those_of_transformers(client):
    prompt = [5, 40, 50, 60, 7, 9]
    choice = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=8,
        temperature=0,
        logprobs=5,
        echo=True,
        extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True},
    ).choices[0]
    ids = prompt + choice.token_ids
    with torch.no_grad():
        logits = hf_model(hf_config("llama"))(torch.tensor([ids])).logits[0]
    expected = torch.log_softmax(logits.float(), -1)
    best = expected.topk(5)
    assert choice.logprobs.token_logprobs[0] is None
    for position, token_id in enumerate(ids[1:]):
        found = choice.logprobs.token_logprobs[position + 1]
        assert found == pytest.approx(expected[position, token_id].item(), abs=1e-4)
        top = choice.logprobs.top_logprobs[position + 1]
        names = [f"token_id:{other}" for other in best.indices[position].tolist()]
        assert list(top)[:5] == names
        assert [top[name] for name in names] == pytest.approx(
            best.values[position].tolist(), abs=1e-4
        )


def test_sampling_fields_reach_the_sampler(client):
    def complete(**fields):
        extra = {"return_token_ids": True, **fields}
        made = client.completions.create(
            model=MODEL, prompt="one two", max_tokens=12, extra_body=extra
        )
        return made.choices[0].token_ids

    greedy = complete(temperature=0)
    assert complete(top_k=1) == greedy
    assert complete(temperature=1e-6) == greedy
    assert complete(top_p=1e-9) == greedy
    assert complete(min_p=1.0) == greedy
    assert complete(seed=5) == complete(seed=5)
    assert complete(temperature=1.5, seed=5) != complete(temperature=1.5, seed=6)
    assert set(complete(allowed_token_ids=[7, 9])) <= {7, 9}
    assert set(complete(temperature=0, logit_bias={"33": 100})) == {33}
    assert greedy[0] not in complete(temperature=0, logit_bias={str(greedy[0]): -100})
    assert len(set(complete(temperature=0, repetition_penalty=1e30))) == 12
    assert complete(top_k=10**18, seed=1) == complete(seed=1)
    assert complete(temperature=0, stop_token_ids=[greedy[4]])[-1] == greedy[4]
