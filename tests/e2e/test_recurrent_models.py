"""Models with recurrent states, served: the tokens of Hugging Face, whatever comes and goes."""

from __future__ import annotations

import pytest
import torch
from support_core import core_of
from support_engines import eager_llm
from support_models import hf_config, hf_model, tiny_model

from girih import LLM, SamplingParams
from girih.kernels.base.errors import ConfigError

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
HYBRID = {
    "num_hidden_layers": 2,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 400, (n,), generator=generator).tolist() for n in (3, 21, 9, 34, 1)]


@pytest.fixture(scope="module")
def expected():
    model = hf_model(hf_config("bamba", **HYBRID))
    results = []
    for prompt in prompts():
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        results.append(ids[len(prompt) :])
    return results


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 8}, {"num_blocks": 6}],
    ids=["together", "few at once", "chunked", "preempted"],
)
def test_tokens_are_those_of_hugging_face(expected, options):
    settings = {"max_model_len": 64, "block_size": 16, "num_blocks": 40, **options}
    llm = eager_llm(tiny_model("bamba", **HYBRID), **settings)
    outputs = llm.generate(prompts(), GREEDY)
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected
    assert [o.num_cached_tokens for o in outputs] == [0] * len(outputs)
    core_of(llm).check_integrity()


def test_an_encoder_is_not_served():
    path = tiny_model("bert", num_attention_heads=4)
    with pytest.raises(ConfigError, match="both directions"):
        LLM(str(path), opt="O0")
