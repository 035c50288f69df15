"""`load_spec`: what a model is, read from its files without building it.

Owns the configuration facts every later stage starts from. Imports neither torch nor transformers:
a start from a bundle needs only this.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from girih.graph.files.rotary_facts import RotaryFacts, read_rotary
from girih.graph.files.sources import ModelFiles, read_json, resolve_source, whole_number
from girih.graph.files.task import POSITIONS_BEHIND_PADDING, Pooling, choose_task, read_pooling
from girih.kernels.base.errors import ConfigError, SourceError
from girih.kernels.base.progress import Progress, no_progress

# Where the weights came from, not what they compute: a fine-tune differs in these and nothing else.
PROVENANCE_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
# Where families write the longest sequence; the first that is there counts.
_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len",
    "context_length",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSpec:
    """A model, as its files describe it.

    Attributes:
        files: where configuration, tokenizer and weights are.
        config: `config.json` as plain data.
        generation: `generation_config.json` as plain data ({} when absent).
        dtype: compute and weight dtype, e.g. "bfloat16".
        task: "generate", "embed" or "classify".
        pooling: what becomes of the hidden states; None for "generate".
        longest: tokens of the longest sequence that will be served, where that decides what is
            computed; None for what the configuration allows.
    """

    files: ModelFiles
    config: dict[str, Any]
    generation: dict[str, Any]
    dtype: str
    task: str = "generate"
    pooling: Pooling | None = None
    longest: int | None = None

    @property
    def name(self) -> str:
        """Short name of the model."""
        return self.files.name

    @property
    def architecture(self) -> str:
        """Class name transformers uses, e.g. "LlamaForCausalLM".

        Raises:
            SourceError: the configuration has something else there.
        """
        names = self.config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SourceError(
                f"{self._config_file}: architectures is {names!r}; it must be a list of class "
                'names, e.g. ["LlamaForCausalLM"]'
            )
        return names[0] if names else str(self.config.get("model_type", "unknown"))

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the configuration that describes the language model."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def vocab_size(self) -> int:
        """Rows of the output head.

        Raises:
            SourceError: the configuration does not say.
        """
        size = self._number("vocab_size")
        if size is None or size < 1:
            raise SourceError(
                f"{self._config_file}: vocab_size is {'missing' if size is None else size}; it "
                "must be a whole number of at least 1"
            )
        return size

    @property
    def max_position(self) -> int | None:
        """Longest sequence the configuration allows, in tokens; None where it names no limit.

        A sparse attention that picks so many tokens (`index_topk`, `indexer_budget`) is run as full
        attention, which is the same for sequences of at most that length.

        Raises:
            SourceError: a limit is no whole number.
        """
        picked = [self._number(name) for name in ("index_topk", "indexer_budget")]
        configured = self._configured_length
        if configured is not None:  # yarn may have been added to it by hand
            configured = max(configured, self.rotary.reach or 0)
        return min((number for number in (configured, *picked) if number), default=None)

    @property
    def rotary(self) -> RotaryFacts:
        """The configuration's rotary embedding."""
        return read_rotary(self.text_config)

    @property
    def usual_length(self) -> int:
        """Longest sequence its makers meant: embedders may be made for shorter ones, in tokens.

        Raises:
            SourceError: the files name none; the user has to.
        """
        meant = self.pooling.max_tokens if self.pooling is not None else None
        lengths = [length for length in (self.max_position, meant) if length]
        if not lengths:
            raise SourceError(
                f"{self._config_file} does not say how long a sequence may be (none of "
                f"{', '.join(_LENGTH_KEYS)}); set model.max_model_len to as many tokens as you want"
            )
        return min(lengths)

    @property
    def has_token_types(self) -> bool:
        """True if the model tells the two texts of a pair apart by a type given with each token."""
        return self.task == "classify" and (self._number("type_vocab_size") or 0) > 1

    @property
    def pools_mean(self) -> bool:
        """True if the mean of the hidden states is part of the graph."""
        return self.pooling is not None and self.pooling.mode == "mean"

    @property
    def _configured_length(self) -> int | None:
        for key in _LENGTH_KEYS:
            length = self._number(key)
            if length and length > 0:
                behind = self.text_config.get("model_type") in POSITIONS_BEHIND_PADDING
                unused = (self._number("pad_token_id") or 0) + 1 if behind else 0
                return length - unused
        return None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation (generation config first, then config).

        Raises:
            SourceError: they are no token ids.
        """
        for source, file in (
            (self.generation, self.files.path / "generation_config.json"),
            (self.text_config, self._config_file),
            (self.config, self._config_file),
        ):
            ids = source.get("eos_token_id")
            if ids is None:
                continue
            listed = ids if isinstance(ids, list) else [ids]
            if not all(type(number) is int for number in listed):
                raise SourceError(
                    f"{file}: eos_token_id is {ids!r}; it must be a token id (a whole number) or a "
                    "list of them"
                )
            return tuple(listed)
        return ()

    @property
    def _config_file(self) -> Path:
        return self.files.path / "config.json"

    def _number(self, key: str) -> int | None:
        """A whole number of the language model's configuration; None where it has none."""
        return whole_number(self.text_config, key, self._config_file)

    @property
    def has_short_factors(self) -> bool:
        """True if "longrope" has its short factors: no longer sequence will be served."""
        short = self.rotary.short_length
        return short is not None and self.longest is not None and self.longest <= short

    def key_entries(self) -> list[tuple[str, str]]:
        """Return what of the spec decides the compiled code, as (name, value) pairs."""
        entries = [("dtype", self.dtype)]
        if self.task != "generate":
            entries += [("task", self.task), ("pools_mean", str(self.pools_mean))]
        if self.rotary.short_length is not None:
            entries.append(("rotary_factors", "short" if self.has_short_factors else "long"))
        for name in sorted(self.config):
            if name not in PROVENANCE_KEYS:
                value = json.dumps(self.config[name], sort_keys=True)
                entries.append((f"config.{name}", value))
        return entries

    @property
    def key(self) -> str:
        """Hash of `key_entries`."""
        text = "\n".join(f"{k}={v}" for k, v in self.key_entries())
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def as_text(self) -> str:
        """Summary for people."""
        c = self.text_config
        heads = c.get("num_attention_heads")
        return (
            f"model {self.name}: {self.architecture}, {self.dtype}\n"
            f"  layers {c.get('num_hidden_layers')}, hidden {c.get('hidden_size')}, heads {heads}"
            f" ({c.get('num_key_value_heads', heads)} kv), vocabulary {c.get('vocab_size')}\n"
            f"  files {self.files.name}, key {self.key}\n" + self._task_text()
        )

    def _task_text(self) -> str:
        if self.pooling is None:
            return ""
        length = ", length 1" if self.pooling.normalize else ""
        return f"  task {self.task}, pooling {self.pooling.mode}{length}\n"


def load_spec(
    source: str,
    dtype: str = "auto",
    progress: Progress = no_progress,
    task: str = "auto",
    pooling: str = "auto",
    longest: int | None = None,
) -> ModelSpec:
    """Read what a model is.

    Args:
        source: HF directory, `.gguf` file, hub id, or built-in name.
        dtype: "auto" for the checkpoint's own, else "bfloat16", "float16" or "float32".
        progress: observer of downloads and conversions.
        task: "auto" goes by the model's head, else one of `TASKS`.
        pooling: "auto" goes by the model's files, else one of `POOLINGS`.
        longest: as in `ModelSpec`.

    Raises:
        SourceError: the source is missing or unreadable.
        ConfigError: the dtype is none of the above, or the model has no such task or pooling.
    """
    allowed = ("auto", "bfloat16", "float16", "float32")
    if dtype not in allowed:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(allowed)}")
    files = resolve_source(source, progress)
    config = read_json(files.path / "config.json")
    _refuse_quantised(config, files.path)
    generation_path = files.path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    resolved = files.dtype if dtype == "auto" else dtype
    spec = ModelSpec(files, config, generation, resolved, longest=longest)
    chosen = choose_task(spec.architecture, files.path, task)
    if chosen == "generate":
        if pooling != "auto":
            raise ConfigError(f"model.pooling is {pooling!r}, but {spec.name} generates; leave it")
        return spec
    return replace(spec, task=chosen, pooling=read_pooling(config, files.path, chosen, pooling))


def _refuse_quantised(config: dict[str, Any], path: Path) -> None:
    """Weights that need scales beside them would load as they are, and mean nothing."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        how = part.get("quantization_config")
        if how:
            method = how.get("quant_method") if isinstance(how, dict) else how
            raise SourceError(
                f"{path / 'config.json'} says that the weights are quantised (quant_method "
                f"{method!r}); girih reads float32, bfloat16 and float16 safetensors, and "
                "quantised weights from GGUF files: use such a copy"
            )
