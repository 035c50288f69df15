"""Greedy tokens of `LLM` against transformers' `generate`, on generated prompts and batches.

Tiny random models in float32, without compilation: what batching, chunked prompts, the prefix
cache and the sampler do to the tokens (compiled tiles are compared in `tests/e2e`).
"""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_conformance import cases
from support_engines import eager_llm
from support_models import SMALL, tiny_model
from transformers import AutoModelForCausalLM

from girih import SamplingParams

KINDS = ("llama", "gemma3_text")  # one kind of layer; windows of 8 tokens beside whole ones
TOKENS = st.one_of(st.integers(0, 420), st.integers(3, 6))  # of few tokens: what repeats


@functools.cache
def both(kind):
    """An engine that splits prompts into chunks of 24 tokens, and the library's model."""
    path = str(tiny_model(kind))
    options = {"max_model_len": 128, "num_blocks": 64, "max_num_batched_tokens": 24}
    llm = eager_llm(path, dtype="float32", block_size=16, threads=1, **options)
    return llm, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@st.composite
def prompts(draw):
    """One to four prompts; some begin alike."""
    shared = draw(st.lists(TOKENS, max_size=40))
    ends = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=20), min_size=1, max_size=4))
    return [shared * draw(st.booleans()) + end for end in ends]


@torch.inference_mode()
def generate(model, prompt, max_tokens, min_tokens, penalty):
    """The library's tokens, the one that ends them included."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        repetition_penalty=penalty,
        pad_token_id=0,
        eos_token_id=SMALL["eos_token_id"],
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
@cases(30)
@given(
    batch=prompts(),
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 4),
    penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
)
def test_greedy_tokens_are_those_of_generate(kind, batch, max_tokens, min_tokens, penalty):
    llm, model = both(kind)
    min_tokens = min(min_tokens, max_tokens)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        repetition_penalty=penalty,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [
        generate(model, prompt, max_tokens, min_tokens, penalty) for prompt in batch
    ]
