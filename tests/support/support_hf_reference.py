"""What Hugging Face says: greedy tokens, logits and near-ties, for comparisons with real models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from support_core import core_of

from girih import LLM
from girih.graph.execute.step_inputs import StepInputs
from girih.kernels.attention.metadata import AttentionMetadata

SHORT = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "2 + 2 =",
    "Q: What is the boiling point of water?\nA:",
    "Hello",
    "The quick brown fox jumps over the lazy dog. The dog",
    "List three colours of the rainbow:\n1.",
    "Write a haiku about autumn.\n",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "To be, or not to be, that is",
    "import numpy as np\n\ndef softmax(x):\n",
    "def fib(n):",
    "SELECT name, COUNT(*) FROM users WHERE",
    "#include <stdio.h>\n\nint main(void) {\n",
    "<html>\n<head>\n<title>",
    '{"name": "Ada", "age": 36, "city":',
    "今天天气很好,我们去",
    "人工智能是",
    "日本の首都は",
    "🙂🙃 emoji test 🚀🚀 means",
    "I ❤️ pizza because 🍕",
    "Ça va bien, merci. Et toi ? Je",
)
LONG_SENTENCE = "In the year {}, the scientist wrote in her notebook that the experiment number {} "
SHARED_LONG = "".join(LONG_SENTENCE.format(1900 + i, i * 7) for i in range(34))


def prompt_token_ids(model_path: Path) -> list[list[int]]:
    """Ids of 24 varied prompts: short, code, Chinese, emoji, and two of 600 tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in SHORT]
    long = tokenizer.encode(SHARED_LONG).ids
    assert len(long) >= 600, f"the long prompt has only {len(long)} tokens"
    return [*ids, long[:600], [*long[:520], *tokenizer.encode(" and then the story changed").ids]]


@torch.inference_mode()
def prompt_logits(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Logits [T, V] of every prompt token, in one step of the bound program."""
    executable = core_of(llm).runner.executable
    size, n = executable.block_size, len(prompt)
    blocks = torch.arange(1, -(-n // size) + 1, dtype=torch.int32)[None]
    positions = torch.arange(n)
    step = StepInputs(
        ids=torch.tensor(prompt),
        positions=positions,
        logits_index=positions,
        attention=AttentionMetadata(
            query_start=torch.tensor([0, n], dtype=torch.int32),
            seq_lens=torch.tensor([n], dtype=torch.int32),
            block_tables=(blocks,),
            slot_mappings=(blocks[0].long()[positions // size] * size + positions % size,),
        ),
    )
    return executable.run(step).float()


@dataclass(frozen=True)
class Reference:
    """HF's greedy continuation of each prompt, and the gap between its two best logits."""

    token_ids: list[list[int]]
    gaps: list[list[float]]


def load_hf(model_path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The model as transformers runs it."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).eval()
    return model


@torch.inference_mode()
def greedy_reference(
    model: torch.nn.Module, prompts: list[list[int]], num_tokens: int, cache_file: Path
) -> Reference:
    """Greedy tokens by HF's own `generate`, one prompt at a time (kept in `cache_file`)."""
    if cache_file.exists():
        return Reference(*torch.load(cache_file))
    token_ids, gaps = [], []
    for prompt in prompts:
        out = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_ids.append(out.sequences[0, len(prompt) :].tolist())
        best = torch.stack(out.logits)[:, 0].float().topk(2, dim=-1).values
        gaps.append((best[:, 0] - best[:, 1]).tolist())
    torch.save((token_ids, gaps), cache_file)
    return Reference(token_ids, gaps)


def differences(
    reference: Reference, found: list[list[int]], tolerance: float = 1e-4
) -> tuple[list[str], list[str]]:
    """Compare greedy tokens.

    Returns:
        (real differences, differences where HF's two best logits are within `tolerance`). After
        the first difference of a prompt the continuations are not comparable.
    """
    real, ties = [], []
    for number, (expected, got) in enumerate(zip(reference.token_ids, found, strict=True)):
        for position, (a, b) in enumerate(zip(expected, got, strict=True)):
            if a != b:
                gap = reference.gaps[number][position]
                text = f"prompt {number} token {position}: HF {a}, girih {b}, gap {gap:.2e}"
                (ties if gap <= tolerance else real).append(text)
                break
    return real, ties
