"""Real models against Hugging Face: same greedy tokens in float32, close logits in bfloat16."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support_core import core_of
from support_hf_reference import (
    Reference,
    differences,
    greedy_reference,
    load_hf,
    prompt_logits,
    prompt_token_ids,
)

from girih import LLM, SamplingParams
from girih.graph.files.fetch import BUILTIN_MODELS
from girih.graph.files.sources import resolve_source

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore"),
]

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A real model in float32 and what HF says about it."""

    name: str
    path: Path
    prompts: list[list[int]]
    reference: Reference

    def llm(self, **options: object) -> LLM:
        return LLM(str(self.path), dtype="float32", max_model_len=1024, **options)

    def check(self, llm: LLM, one_by_one: bool = False) -> None:
        if one_by_one:
            outputs = [llm.generate([p], GREEDY)[0] for p in self.prompts]
        else:
            outputs = llm.generate(self.prompts, GREEDY)
        real, ties = differences(self.reference, [list(o.outputs[0].token_ids) for o in outputs])
        for tie in ties:
            print(f"{self.name}: near-tie {tie}")
        assert not real
        core_of(llm).check_integrity()


@pytest.fixture(scope="module", params=sorted(BUILTIN_MODELS))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    path = resolve_source(request.param).path
    prompts = prompt_token_ids(path)
    cache_file = Path(request.config.cache.mkdir("hf_reference")) / f"{request.param}.pt"
    model = None if cache_file.exists() else load_hf(path, torch.float32)
    reference = greedy_reference(model, prompts, NUM_TOKENS, cache_file)
    yield Case(request.param, path, prompts, reference)


def test_one_batch_then_warm_prefix_cache(case: Case) -> None:
    llm = case.llm(max_num_seqs=32)
    case.check(llm)
    before = core_of(llm).stats().kv_cache.prefix_hits
    case.check(llm)
    assert core_of(llm).stats().kv_cache.prefix_hits > before


def test_alone(case: Case) -> None:
    case.check(case.llm(), one_by_one=True)


def test_chunked_prefill(case: Case) -> None:
    case.check(case.llm(max_num_batched_tokens=64, enable_prefix_caching=False))


def test_preempted(case: Case) -> None:
    # Gemma's KV groups need more, smaller blocks.
    limits = {"smollm2": {"num_blocks": 48}, "gemma3_270m": {"num_blocks": 150}}[case.name]
    llm = case.llm(
        **limits, max_num_batched_tokens=64, max_num_seqs=32, enable_prefix_caching=False
    )
    num_groups = len(core_of(llm).runner.executable.groups.groups)
    assert num_groups == (6 if case.name == "gemma3_270m" else 1)
    case.check(llm)
    assert core_of(llm).stats().num_preemptions > 0


def test_eager_level(case: Case) -> None:
    case.check(case.llm(opt="O0", max_num_seqs=32))


@pytest.mark.slow
def test_eager_level_alone(case: Case) -> None:
    case.check(case.llm(opt="O0"), one_by_one=True)


@torch.inference_mode()
def test_bfloat16_logits_are_close(case: Case) -> None:
    """Relative RMSE against HF in bfloat16 over all prompts is under 2e-2.

    SmolLM2 misses it (0.0211 on AVX2); HF's own two attention implementations are 0.0233 apart.
    """
    llm = LLM(str(case.path), dtype="bfloat16", max_model_len=1024)
    model = load_hf(case.path, torch.bfloat16)
    sdpa = [model(torch.tensor([prompt])).logits[0].float() for prompt in case.prompts]
    model.set_attn_implementation("eager")
    eager = [model(torch.tensor([prompt])).logits[0].float() for prompt in case.prompts]
    ours = [prompt_logits(llm, prompt) for prompt in case.prompts]
    error, own = relative_rmse(ours, sdpa), relative_rmse(eager, sdpa)
    print(f"{case.name}: relative RMSE {error:.4f}; HF eager against HF sdpa {own:.4f}")
    if case.name == "smollm2" and 2e-2 <= error < own:
        pytest.xfail(f"relative RMSE {error:.4f}, wanted 2e-2; HF differs from itself by {own:.4f}")
    assert error < 2e-2


def relative_rmse(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = list(zip(found, expected, strict=True))
    error = sum((a - b).square().sum().item() for a, b in pairs)
    norm = sum(b.square().sum().item() for _, b in pairs)
    return float((error / norm) ** 0.5)
