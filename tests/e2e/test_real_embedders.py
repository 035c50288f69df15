"""Real embedders against transformers in float32: MiniLM by the mean, SmolLM2 by its last token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from girih import LLM
from girih.graph.files.sources import resolve_source

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore"),
]

TEXTS = [
    "Girih tiles cover a wall with five shapes.",
    "Five shapes of tile are enough for any girih pattern.",
    "The tax on tea was raised in 1773.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)",
    "你好，世界！ naïve café 😀",
    "one two three " * 60,
]


def expected(path: Path, ids: list[list[int]], pooling: str) -> torch.Tensor:
    """Embeddings [N, H] of each text alone."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        for tokens in ids:
            hidden = model(torch.tensor([tokens])).last_hidden_state[0]
            rows.append(hidden.mean(0) if pooling == "mean" else hidden[-1])
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


@pytest.mark.parametrize(("name", "pooling"), [("minilm", "mean"), ("smollm2", "last")])
@pytest.mark.parametrize("opt", ["O0", "O2"])
def test_embeddings_are_those_of_transformers(name: str, pooling: str, opt: str) -> None:
    path = resolve_source(name).path
    llm = LLM(name, task="embed", dtype="float32", opt=opt, max_model_len=512)
    assert llm.facts.pooling is not None
    assert llm.facts.pooling.mode == pooling
    found = llm.embed(TEXTS)
    vectors = torch.tensor([output.embedding for output in found])
    reference = expected(path, [output.prompt_token_ids for output in found], pooling)
    worst = float((vectors - reference).abs().max())
    cosine = float((vectors * reference).sum(-1).min())
    print(f"{name} {opt}: largest difference {worst:.1e}, smallest cosine {cosine:.7f}")
    assert worst < 2e-5
    if name == "minilm":
        close, far = (output.score for output in llm.score(TEXTS[0], TEXTS[1:3]))
        assert close > 0.7 > 0.3 > far
