"""A decoder whose feed-forward part looks at values in Python, so that no graph can hold it.

Registered with transformers as `girih_spread`: a Llama whose MLP loops over the experts that its
tokens chose, and clips what grows too large only when something did. `mixes` makes it subtract the
mean of all tokens instead, which no step of packed sequences may do; `counts` keeps state.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from support_models import SMALL, write_hf
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

LIMIT, OFFSET = 3.0, 0.25


class SpreadConfig(LlamaConfig):
    """Llama's, and how the feed-forward part behaves."""

    model_type = "girih_spread"
    num_experts: int = 3
    mixes: bool = False
    counts: bool = False


class SpreadMLP(nn.Module):
    """One expert per token, in a Python loop; returns the choices' weights too."""

    def __init__(self, config: SpreadConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.router = nn.Linear(size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, inner), nn.SiLU(), nn.Linear(inner, size))
            for _ in range(config.num_experts)
        )
        self.register_buffer("offset", torch.full((size,), OFFSET), persistent=False)
        self.mixes, self.counts, self.calls = config.mixes, config.counts, 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.router(x).softmax(-1)
        index = chosen.argmax(-1)
        out = torch.zeros_like(x)
        for expert in index.unique().tolist():
            rows = index == expert
            out[rows] = self.experts[expert](x[rows] + self.offset) * chosen[rows][:, [expert]]
        if out.abs().max().item() > LIMIT:
            out = out.clamp(-LIMIT, LIMIT)
        self.calls += 1
        if self.counts:
            out = out * self.calls
        return out - x.mean(1, keepdim=True) if self.mixes else out, chosen


class _First(nn.Module):
    """Gives a decoder layer the first result only."""

    def __init__(self, config: SpreadConfig) -> None:
        super().__init__()
        self.spread = SpreadMLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, chosen = self.spread(x)
        return out * (1.0 + chosen[..., :1])


class SpreadModel(LlamaModel):
    """A Llama with such feed-forward parts, without a head."""

    def __init__(self, config: SpreadConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = _First(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SpreadMLP):
            module.offset.fill_(OFFSET)


class SpreadForCausalLM(LlamaForCausalLM):
    """The same with its head."""

    config_class = SpreadConfig

    def __init__(self, config: SpreadConfig) -> None:
        super().__init__(config)
        self.model = SpreadModel(config)
        self.post_init()


AutoConfig.register("girih_spread", SpreadConfig, exist_ok=True)
AutoModelForCausalLM.register(SpreadConfig, SpreadForCausalLM, exist_ok=True)


def write_spread(path: Path | None = None, **changes: Any) -> Path:
    """Write a tiny random one with a tokenizer; returns its directory."""
    path = path or Path(tempfile.mkdtemp(prefix="spread-"))
    config = SpreadConfig(**{**SMALL, "bos_token_id": 1, "pad_token_id": 0, **changes})
    return write_hf(path, config)
