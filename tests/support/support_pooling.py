"""Tiny random models that embed or classify, on disk, and what transformers makes of them."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import support_tokenizer
import torch
from support_engines import eager_engine
from tokenizers import Tokenizer, processors

from girih.runtime.records.pooling_params import PoolingParams
from girih.runtime.records.request import EngineRequest
from girih.runtime.start.launch import Engine, build_engine
from girih.serve.offline.options import engine_config

CLS, SEP = 1, 2
LENGTHS = (21, 9, 30)
# Settings that every family takes from those it knows.
SETTINGS: dict[str, Any] = {
    "vocab_size": 424, "max_position_embeddings": 160, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": SEP, "cls_token_id": CLS, "sep_token_id": SEP, "type_vocab_size": 2,
    "hidden_size": 64, "dim": 64, "embedding_size": 64, "intermediate_size": 96, "hidden_dim": 96,
    "num_hidden_layers": 2, "n_layers": 2, "num_attention_heads": 4, "n_heads": 4,
    "num_key_value_heads": 2, "local_attention": 8, "global_attn_every_n_layers": 2,
    "head_dim": 16,
}  # fmt: skip


def hf_pooled(kind: str, head: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A random float32 model.

    Args:
        kind: transformers' model_type.
        head: "classify", "embed" (no head) or "generate".
        seed: of the weights.
        changes: settings beside `SETTINGS`.
    """
    import transformers

    known = {*transformers.CONFIG_MAPPING[kind]().to_dict()} | {"num_labels", "id2label"}
    settings = {k: v for k, v in SETTINGS.items() if k in known} | changes
    config = transformers.AutoConfig.for_model(kind, **settings)
    auto = {
        "classify": transformers.AutoModelForSequenceClassification,
        "embed": transformers.AutoModel,
        "generate": transformers.AutoModelForCausalLM,
    }[head]
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.normal_(std=0.5 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model.eval()


def write_pooled(path: Path, kind: str, head: str, seed: int = 0, **changes: Any) -> Any:
    """Save a random model with a tokenizer that frames texts; returns transformers' model."""
    model = hf_pooled(kind, head, seed, **changes)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(framing_tokenizer())
    return model


def write_sentence_layout(path: Path, mode: str, *, normalize: bool, layers: int = 0) -> list[Any]:
    """Add what sentence-transformers keeps beside a model; returns the linear layers."""
    from safetensors.torch import save_file

    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (path / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", mode)}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    made = []
    for number in range(2, 2 + layers):
        layer = torch.nn.Linear(64, 48 if number == 1 + layers else 64)
        modules.append((f"{number}_Dense", "Dense"))
        folder = path / f"{number}_Dense"
        folder.mkdir()
        activation = "torch.nn.modules.activation.Tanh"
        (folder / "config.json").write_text(json.dumps({"activation_function": activation}))
        tensors = {f"linear.{name}": value.detach() for name, value in layer.named_parameters()}
        save_file(tensors, folder / "model.safetensors")
        made.append(layer)
    if normalize:
        modules.append(("9_Normalize", "Normalize"))
    listed = [{"path": p, "type": f"sentence_transformers.models.{t}"} for p, t in modules]
    (path / "modules.json").write_text(json.dumps(listed))
    return made


def framing_tokenizer() -> str:
    """The byte-level tokenizer with a mark before and after each text, and types in a pair."""
    backend = Tokenizer.from_str(support_tokenizer._trained_byte_level())
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|im_start|> $A <|im_end|>",
                pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
                special_tokens=[("<|im_start|>", CLS), ("<|im_end|>", SEP)],
            ),
        ]
    )
    return backend.to_str()


def engine(path: Path, **options: Any) -> Engine:
    """An engine over eager pieces."""
    wanted = {"opt": "O0", "threads": 1, "num_blocks": 60, "block_size": 16, **options}
    if wanted["opt"] == "O0":
        return eager_engine(path, **wanted)
    return build_engine(engine_config(str(path), wanted))


def random_texts(lengths: tuple[int, ...] = LENGTHS, seed: int = 7) -> list[list[int]]:
    """Token ids without control tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 420, (n,), generator=generator).tolist() for n in lengths]


def vectors(
    handle: Engine,
    texts: list[list[int]],
    params: list[PoolingParams] | None = None,
) -> list[np.ndarray]:
    """What the engine makes of texts that arrive together."""
    core = handle.core
    chosen = params or [PoolingParams()] * len(texts)
    for number, (ids, wanted) in enumerate(zip(texts, chosen, strict=True)):
        core.add_request(
            EngineRequest(request_id=f"r{number}", prompt_token_ids=ids, pooling=wanted)
        )
    found: dict[str, np.ndarray] = {}
    while core.has_work():
        for output in core.step():
            assert output.finish_reason == "stop", output
            found[output.request_id] = np.frombuffer(output.pooled, "<f4")
        core.check_integrity()
    pool = core.scheduler.kv_cache.pool
    assert pool.num_free == pool.num_usable
    return [found[f"r{number}"] for number in range(len(texts))]


def hidden_states(model: Any, ids: list[int]) -> torch.Tensor:
    """Last hidden states [T, H] of one text alone."""
    base = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        return base(torch.tensor([ids])).last_hidden_state[0]


def label_values(model: Any, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    """Values [labels] of a classifier before any activation."""
    options = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        return model(torch.tensor([ids]), **options).logits[0]


def difference(found: np.ndarray, expected: torch.Tensor) -> float:
    """Largest difference of two vectors, relative to the larger of 1 and the expected values."""
    assert found.shape == tuple(expected.shape), (found.shape, expected.shape)
    scale = max(1.0, float(expected.abs().max()))
    result = float(np.abs(found - expected.numpy()).max()) / scale
    return math.inf if math.isnan(result) else result
