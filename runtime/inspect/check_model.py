"""`girih check`: a model's own architecture, with random weights, against transformers.

The configuration is the model's, so widths, heads, windows and layer kinds are what will be served;
the weights are random and float32, so no download is needed and nothing hides in rounding. With
fewer layers a model fits where it otherwise would not.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from girih.graph.execute.executable import Executable
from girih.graph.files.model_files import model_settings, save_model
from girih.graph.files.spec import ModelSpec, load_spec
from girih.graph.tiles.inductor import eager_tile
from girih.graph.trace.trace import auto_class, trace
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.kernels.base.errors import CapacityError, ConfigError, TraceError
from girih.kernels.base.progress import Progress, ProgressEvent, no_progress
from girih.kernels.base.target import Target
from girih.passes.build.build import Place, find_or_build, lower_and_partition
from girih.runtime.records.config import EngineConfig
from girih.runtime.schedule.cache_size import available_memory
from girih.runtime.start.context import target_of
from girih.runtime.start.runnable_program import bundle_code
from girih.runtime.verify.model import (
    LEAST_SPREAD,
    LENGTHS,
    NEW_TOKENS,
    ModelResult,
    bind,
    spread_weights,
    verify_model,
)

# Reference, loaded weights and what loading needs beside them, by the bytes of the weights.
_COPIES = 2.2


@dataclass(frozen=True)
class CheckReport:
    """The findings of a check.

    Attributes:
        result: the comparison.
        text: a table for people.
    """

    result: ModelResult
    text: str


def check_model(
    config: EngineConfig, layers: int | None = None, progress: Progress = no_progress
) -> CheckReport:
    """Compare girih's program with transformers' eager logits in float32.

    Args:
        config: the model (its weights are not read), level, target and cache.
        layers: how many of its layers; None takes all.
        progress: observer.

    Raises:
        ConfigError: the model has no such number of layers.
        CapacityError: the random model does not fit into memory or onto disk.
        TraceError, CompileError: girih does not compile this architecture; names the reason.
    """
    spec = _spec(config.model.source, progress)
    settings, depth = _scaled(model_settings(spec), layers)
    target = target_of(config)
    auto = auto_class(spec)
    _require_room(auto, settings, depth)
    progress(ProgressEvent("check", 0, None, "random weights"))
    model = random_model(auto, settings)
    with tempfile.TemporaryDirectory(prefix="girih-check-") as directory:
        save_model(model, Path(directory))
        executable = _executable(config, _spec(directory), target, progress)
        progress(ProgressEvent("check", 0, None, "transformers, one sequence at a time"))
        generates = "CausalLM" in auto.__name__
        result = verify_model(model, executable, spec.vocab_size, encodes=not generates)
    return CheckReport(result, _table(spec, settings, depth, config, executable, result))


def random_model(auto: Any, settings: Any, seed: int = 0) -> torch.nn.Module:
    """transformers' model of a configuration in float32 on its eager attention, random weights."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_config(settings, dtype=torch.float32, attn_implementation="eager")
    spread_weights(model, seed)
    result: torch.nn.Module = model.eval()
    return result


def _spec(source: str, progress: Progress = no_progress) -> ModelSpec:
    """A model by all its rows: the logits of a decoder, the hidden states of an encoder."""
    spec = load_spec(source, "float32", progress, longest=max(LENGTHS) + NEW_TOKENS)
    if spec.task == "classify":
        raise ConfigError(
            f"{spec.architecture} classifies; girih check compares logits of decoders and hidden "
            "states of encoders"
        )
    return replace(spec, task="generate", pooling=None)


def _scaled(settings: Any, layers: int | None) -> tuple[Any, int]:
    """The configuration with its first `layers` layers, and how many it has in full."""
    settings = copy.deepcopy(settings)
    inner = settings.get_text_config()
    depth = int(getattr(inner, "num_hidden_layers", 0))
    if layers is None:
        return settings, depth
    if not 0 < layers <= depth:
        raise ConfigError(f"check.layers is {layers}; this model has 1 to {depth} layers")
    for name, value in list(vars(inner).items()):
        if isinstance(value, (list, tuple)) and len(value) == depth:
            setattr(inner, name, type(value)(value[:layers]))
    inner.num_hidden_layers = layers
    return settings, depth


def _require_room(auto: Any, settings: Any, depth: int) -> None:
    """Refuse before any memory is taken."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = auto.from_config(copy.deepcopy(settings), dtype=torch.float32)
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"transformers cannot build this model: {error}") from error
    weights = sum(p.numel() for p in model.parameters()) * 4
    needed, free = int(weights * _COPIES), available_memory()
    room = shutil.disk_usage(tempfile.gettempdir()).free
    shallow = f"set check.layers=N to compare fewer of its {depth} layers"
    if needed > free:
        raise CapacityError(
            f"the model has {weights / 2**30:.1f} GiB of float32 weights and the check needs about "
            f"{needed / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are free; {shallow}"
        )
    if weights > room:
        raise CapacityError(
            f"the model has {weights / 2**30:.1f} GiB of float32 weights and "
            f"{tempfile.gettempdir()} has {room / 2**30:.1f} GiB free; {shallow}, or set TMPDIR"
        )


def _executable(
    config: EngineConfig, spec: ModelSpec, target: Target, progress: Progress
) -> Executable:
    """The program as the engine would have it: from a bundle, or at O0 from eager pieces."""
    if config.opt.compile:
        place = Place(cache_bytes=int(config.compile.cache_gib * 2**30))
        bundle, _ = find_or_build(spec, config.opt, target, place, progress)
        layout, plan, constants = bundle.layout, bundle.weights, bundle.constants
        tiles, attention = bundle_code(bundle, spec), None
    else:
        _, program = lower_and_partition(trace(spec, progress), config.opt, target)
        layout, plan, constants = program.layout, program.weights, program.constants
        tiles = {key: eager_tile(tile.graph) for key, tile in program.tiles.items()}
        attention = "reference"
    with open_checkpoint(spec.files) as checkpoint:
        weights = load_weights(plan, checkpoint, constants, target.isa, progress)
    return bind(layout, tiles, weights, attention)


def _table(
    spec: ModelSpec,
    settings: Any,
    depth: int,
    config: EngineConfig,
    executable: Executable,
    result: ModelResult,
) -> str:
    layers = int(getattr(settings.get_text_config(), "num_hidden_layers", depth))
    counts = executable.layout.tile_counts
    kind = "compiled" if config.opt.compile else "eager"
    what = "logits" if result.num_tokens else "hidden states"
    lines = [
        f"model {spec.name}: {spec.architecture}, {layers} of {depth} layers, random float32 "
        "weights",
        f"program: opt {config.opt.level}, {sum(counts.values())} pieces, {len(counts)} {kind} "
        f"tiles; {len(LENGTHS)} sequences of {', '.join(map(str, LENGTHS))} tokens in one step",
        "",
        f"{'compared with transformers':28s} {'found':>10s} {'allowed':>10s}",
        f"{what + ', difference':28s} {result.error:10.1e} {result.bound:10.1e}",
        f"{what + ', spread':28s} {result.spread:10.1e} {f'≥ {LEAST_SPREAD:.1e}':>10s}",
    ]
    if result.num_tokens:
        same = f"{result.num_same}/{result.num_tokens}"
        name = f"greedy tokens, {NEW_TOKENS} each"
        lines.append(f"{name:28s} {same:>10s} {'all':>10s}")
    return "\n".join([*lines, "", result.as_text()])
