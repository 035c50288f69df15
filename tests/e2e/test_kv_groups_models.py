"""Models whose layers forget, with prompts far longer than they remember: the tokens of HF."""

from __future__ import annotations

import functools

import pytest
import torch
from support_core import core_of, engine_of
from support_engines import eager_llm
from support_models import hf_config, hf_model, tiny_model

from girih import SamplingParams

NUM_TOKENS = 24
LENGTHS = (3, 250, 90, 191, 60, 61, 62, 63)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
MODELS = {
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 40},
    "llama4_text": {
        "num_hidden_layers": 4,
        "attention_chunk_size": 48,
        "no_rope_layers": [1, 1, 1, 0],
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
    },
}
# (layers, window, chunk) of each group.
GROUPS = {
    "gemma3_text": [(2, 0, 0), (2, 40, 0), (2, 40, 0)],
    "llama4_text": [(1, 0, 0), (1, 0, 48), (1, 0, 48), (1, 0, 48)],
}


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 400, (n,), generator=generator).tolist() for n in LENGTHS]


@functools.cache
def expected(kind):
    model = hf_model(hf_config(kind, **MODELS[kind]))
    results = []
    for prompt in prompts():
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        results.append(ids[len(prompt) :])
    return results


def new_llm(kind, **options):
    settings = {"max_model_len": 400, "block_size": 16, "num_blocks": 400, **options}
    return eager_llm(tiny_model(kind, **MODELS[kind]), **settings)


def tokens(llm, wanted):
    return [list(o.outputs[0].token_ids) for o in llm.generate(wanted, GREEDY)]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 32},
        {"max_num_batched_tokens": 32, "async_scheduling": False},
        {"max_num_batched_tokens": 24, "num_blocks": 56},
        {"max_num_batched_tokens": 24, "num_blocks": 56, "enable_prefix_caching": False},
    ],
    ids=["together", "chunked", "without planning ahead", "preempted", "computed anew"],
)
def test_tokens_are_those_of_hugging_face(kind, options):
    llm = new_llm(kind, **options)
    groups = core_of(llm).runner.executable.groups.groups
    assert [(len(g.layers), g.window, g.chunk) for g in groups] == GROUPS[kind]
    assert tokens(llm, prompts()) == expected(kind)
    core = core_of(llm)
    core.check_integrity()
    pool = core.scheduler.kv_cache.pool
    assert pool.num_free == pool.num_usable
    assert (core.stats().num_preemptions > 0) == ("num_blocks" in options)


@pytest.mark.parametrize("kind", MODELS)
def test_a_warm_prefix_cache_gives_the_same_tokens(kind):
    llm = new_llm(kind, max_num_batched_tokens=32)
    assert tokens(llm, prompts()) == expected(kind)
    outputs = llm.generate(prompts(), GREEDY)
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected(kind)
    assert [o.num_cached_tokens for o in outputs] == [(n - 1) // 16 * 16 for n in LENGTHS]
    longer = [*prompts()[1][:200], 7, 8, 9]  # leaves the known prefix in the middle of a block
    (warm,) = llm.generate([longer], GREEDY)
    assert warm.num_cached_tokens == 192
    core_of(llm).reset_prefix_cache()
    (cold,) = llm.generate([longer], GREEDY)
    assert cold.num_cached_tokens == 0
    assert list(warm.outputs[0].token_ids) == list(cold.outputs[0].token_ids)


def test_an_int8_cache_gives_the_same_tokens_however_it_is_filled():
    options = {"kv_dtype": "int8", "max_num_batched_tokens": 32}
    llm = new_llm("gemma3_text", kv_dtype="int8")
    # 16 tokens of 2 layers: keys and values of 2 heads, 16 elements and a scale of 4 bytes each
    assert core_of(llm).runner.executable.groups.block_bytes == 16 * 2 * 2 * 2 * (16 + 4)
    assert "int8)" in engine_of(llm).report.memory
    together = tokens(llm, prompts())
    assert tokens(llm, prompts()) == together  # from a warm prefix cache
    assert tokens(new_llm("gemma3_text", **options), prompts()) == together
    assert tokens(new_llm("gemma3_text", **options, num_blocks=56), prompts()) == together


def test_the_start_report_names_the_groups_and_what_they_save():
    memory = engine_of(new_llm("gemma3_text")).report.memory
    assert "kv groups 1 × 2 layers full; 2 × 2 layers window 40\n" in memory
    assert "kv saved  " in memory


def test_auto_length_is_the_largest_that_the_groups_hold():
    block_bytes = 16 * 2 * 2 * (16 + 16) * 4  # tokens, layers, heads, key and value, float32
    llm = new_llm(
        "gemma3_text",
        max_model_len="auto",
        max_num_batched_tokens=16,
        num_blocks=None,
        kv_cache_bytes=32 * block_bytes,
    )
    # 31 blocks: two sliding groups of at most 6 (40 - 1 + 2 × 16 tokens) leave 19 rows of 16
    assert llm.facts.max_model_len == 19 * 16
    prompt = prompts()[1] + prompts()[2][:30]
    (output,) = llm.generate([prompt], GREEDY)
    assert len(output.outputs[0].token_ids) == NUM_TOKENS
    assert core_of(llm).stats().num_preemptions == 0
