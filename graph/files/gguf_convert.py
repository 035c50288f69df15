"""A GGUF file as a Hugging Face directory: config and tokenizer, and the weights if asked for.

Owns what a GGUF's metadata means to transformers. Must not know where the file came from or where
the result is kept. transformers is imported inside the functions: a converted model needs none.

Transformers maps the metadata, but parses the vocabulary value by value each time it looks for the
config (half a minute for Gemma). It is therefore shown a stub: the same metadata without the
vocabulary, and tensors of the same names with one element each.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from girih.graph.files.gguf_file import ROPE_FREQS, GgufFile
from girih.graph.files.safetensors_file import write_safetensors
from girih.kernels.base.errors import SourceError
from girih.kernels.base.progress import Progress, ProgressEvent, no_progress

# Llama 3's published rotary constants; a GGUF stores only the factors they lead to.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert_gguf(
    path: Path, target: Path, dtype: str | None = None, progress: Progress = no_progress
) -> None:
    """Write the whole model to `target` (an existing directory).

    Args:
        path: the GGUF file.
        target: receives config.json, generation_config.json, tokenizer files, model.safetensors.
        dtype: precision of the weights; None takes the file's own (bfloat16 if quantised).
        progress: stage "convert", one unit per tensor.

    Raises:
        SourceError: an unsupported architecture, tokenizer or rotary scaling.
        WeightError: the file is damaged.
    """
    file = GgufFile(path)
    try:
        dtype = dtype or file.header.model_dtype()
        progress(ProgressEvent("convert", 0, len(file.names()), "tokenizer"))
        _write_parts(file, target, dtype)
        _write_weights(file, target, dtype, progress)
    finally:
        file.close()


def convert_gguf_parts(path: Path, target: Path) -> None:
    """Write everything but the weights to `target` (see `convert_gguf`)."""
    file = GgufFile(path)
    try:
        _write_parts(file, target, file.header.model_dtype())
    finally:
        file.close()


def _write_weights(file: GgufFile, target: Path, dtype: str, progress: Progress) -> None:
    import torch

    names = file.names()
    done = 0

    def read(name: str) -> memoryview:
        nonlocal done
        progress(ProgressEvent("convert", done, len(names), name))
        done += 1
        tensor = file.read(name, dtype).contiguous()
        return memoryview(tensor.view(-1).view(torch.uint8).numpy())

    layout = {name: (dtype, file.shape(name)) for name in names}
    write_safetensors(target / "model.safetensors", layout, read)
    progress(ProgressEvent("convert", len(names), len(names), "done"))


def _write_parts(file: GgufFile, target: Path, dtype: str) -> None:
    from transformers import GenerationConfig, PreTrainedTokenizerFast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    with _quiet_transformers():
        config = _config(file)
        config.dtype = dtype
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        generation = GenerationConfig.from_model_config(config)
        generation.eos_token_id = _stop_ids(file.header.metadata, config.eos_token_id)
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                str(file.path.parent), gguf_file=file.path.name
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise SourceError(f"cannot rebuild the tokenizer of {file.path}: {exc}") from exc
        named = _named_templates(file.header.metadata)
        if named:
            main = {} if tokenizer.chat_template is None else {"default": tokenizer.chat_template}
            tokenizer.chat_template = {**main, **named}
        config.save_pretrained(target)
        generation.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide transformers' log lines and bars about steps that are ours to report."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _config(file: GgufFile) -> Any:
    from transformers import AutoConfig

    stub_dir = Path(tempfile.mkdtemp(prefix="girih-gguf-"))
    try:
        _write_stub(file, stub_dir / "stub.gguf")
        config = AutoConfig.from_pretrained(str(stub_dir), gguf_file="stub.gguf")
    except (ValueError, KeyError, OSError) as exc:
        raise SourceError(f"transformers cannot read the config of {file.path}: {exc}") from exc
    finally:
        shutil.rmtree(stub_dir, ignore_errors=True)
    # The embedding is what counts: some files name a smaller vocabulary than they have rows.
    config.vocab_size = file.shape("model.embed_tokens.weight")[0]
    if hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = _query_scalar(config)
    scaling = _rope_scaling(file)
    if scaling:
        parameters = config.rope_parameters
        parameters.get("full_attention", parameters).update(scaling)
    return config


def _query_scalar(config: Any) -> int:
    """Gemma's attention scale, which a GGUF leaves out: only the 27B models (46 layers in the
    second generation, 62 in the third) divide by something else than the head size.
    """
    is_27b = (config.model_type, config.num_hidden_layers) in (("gemma2", 46), ("gemma3_text", 62))
    scalar = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    return int(scalar)


def _write_stub(file: GgufFile, path: Path) -> None:
    import numpy as np
    from gguf import GGUFWriter

    logging.getLogger("gguf").setLevel(logging.WARNING)  # it reports every file it writes
    metadata = file.header.metadata
    architecture = metadata["general.architecture"]
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if key == "general.architecture" or value == []:
            continue
        _add_pair(writer, key, value)
    for name in file.header.tensors:
        writer.add_tensor(name, np.zeros(1, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_pair(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint64(key, value) if value >= 0 else writer.add_int64(key, value)
    elif isinstance(value, float):
        writer.add_float64(key, value)
    elif isinstance(value, str):
        if value:
            writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _named_templates(metadata: dict[str, Any]) -> dict[str, str]:
    """Chat templates beside the main one, which transformers does not read."""
    prefix = "tokenizer.chat_template."
    return {
        key.removeprefix(prefix): value
        for key, value in metadata.items()
        if key.startswith(prefix) and isinstance(value, str)
    }


def _stop_ids(metadata: dict[str, Any], eos: int | list[int] | None) -> int | list[int] | None:
    """End-of-sequence ids, with the end-of-turn id a chat model stops at."""
    turn = metadata.get("tokenizer.ggml.eot_token_id")
    ids = [*(eos if isinstance(eos, list) else [eos]), turn]
    unique = list(dict.fromkeys(i for i in ids if i is not None))
    return unique if len(unique) > 1 else (unique[0] if unique else None)


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    """Return the metadata's rotary scaling in transformers' terms; None for none."""
    metadata = file.header.metadata
    arch = metadata["general.architecture"]
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if ROPE_FREQS in file.header.tensors:
        return _llama3_scaling(file)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata[f"{arch}.rope.scaling.factor"]}
    raise SourceError(
        f"{file.path} scales its rotary embedding by {kind!r}; girih reads 'none', 'linear' and "
        "Llama 3's; use the model's Hugging Face directory instead"
    )


def _llama3_scaling(file: GgufFile) -> dict[str, Any]:
    """Recover Llama 3's rotary factor from the per-frequency factors the file stores."""
    metadata = file.header.metadata
    arch = metadata["general.architecture"]
    theta = metadata.get(f"{arch}.rope.freq_base", 10000.0)
    stored = file.read_factors(ROPE_FREQS)
    scaling = {"rope_type": "llama3", "factor": float(max(stored)), **_LLAMA3}
    for i, factor in enumerate(stored):
        wavelength = 2 * math.pi * theta ** (i / len(stored))
        if not math.isclose(factor, _llama3_factor(wavelength, scaling), rel_tol=1e-3):
            raise SourceError(
                f"{file.path} has rotary factors ({ROPE_FREQS}) that are not Llama 3's; use the "
                "model's Hugging Face directory instead"
            )
    return scaling


def _llama3_factor(wavelength: float, scaling: dict[str, Any]) -> float:
    turns = scaling["original_max_position_embeddings"] / wavelength
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(1 / ((1 - smooth) / factor + smooth))
