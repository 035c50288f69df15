"""The key of a bundle: everything its code depends on, by name. Needs no torch and no tracing."""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import replace
from pathlib import Path

from girih.graph.bundle_files import BundleKey
from girih.graph.cache_dir import cache_dir
from girih.graph.compile_settings import MAX_STEP_TOKENS, inductor_options
from girih.graph.spec import ModelSpec
from girih.kernels.library_sources import source_digest
from girih.kernels.target import Target
from girih.passes.options import PASS_NAMES, OptConfig

ROOT = Path(__file__).resolve().parent.parent


def bundle_key(spec: ModelSpec, opt: OptConfig, target: Target) -> BundleKey:
    """What the compiled code depends on."""
    running, target = opt.runs(), tuned(target, opt)
    entries = [
        *((f"model.{name}", value) for name, value in spec.key_entries()),
        *((f"opt.{name}", str(name in running)) for name in PASS_NAMES),
        ("target.device", target.device),
        ("target.isa", target.isa),
        *((("target.arch", target.arch),) if target.arch else ()),
        ("target.threads", "dynamic"),
        ("target.compiler", target.compiler),
        ("tiles.max_step_tokens", str(MAX_STEP_TOKENS)),
        *((f"inductor.{k}", str(v)) for k, v in sorted(inductor_options(target).items())),
        ("torch", importlib.metadata.version("torch")),
        ("transformers", importlib.metadata.version("transformers")),
        ("girih.kernels", source_digest()[:16]),
        ("girih.compiler", compiler_digest()),
    ]
    return BundleKey(tuple(entries))


def bundle_dir() -> Path:
    """Where bundles are cached."""
    return cache_dir() / "bundles"


def tuned(target: Target, opt: OptConfig) -> Target:
    """The target with what the level says about generated code."""
    return replace(target, fast_math=opt.fast_math)


# Files of graph/ and kernels/ that decide what is compiled; passes/ counts as a whole.
DECIDING = (
    "graph/aoti_include/regex",
    "graph/compile_settings.py",
    "graph/compile_worker.py",
    "graph/adaptations.py",
    "graph/adapted_classes.py",
    "graph/call_form.py",
    "graph/capture.py",
    "graph/conversions.py",
    "graph/eager_modules.py",
    "graph/eager_trial.py",
    "graph/exported_weights.py",
    "graph/inductor.py",
    "graph/mask_request.py",
    "graph/opaque.py",
    "graph/open_calls.py",
    "graph/order.py",
    "graph/partition.py",
    "graph/pooled_model.py",
    "graph/program.py",
    "graph/recurrent_functions.py",
    "graph/rotary.py",
    "graph/rotary_facts.py",
    "graph/spec.py",
    "graph/stamp.py",
    "graph/task.py",
    "graph/text.py",
    "graph/tile_file.py",
    "graph/trace.py",
    "graph/weight_plan.py",
    "kernels/attention.py",
    "kernels/eager_ops.py",
    "kernels/expert_ops.py",
    "kernels/kv_layout.py",
    "kernels/ops.py",
    "kernels/packing.py",
    "kernels/state_ops.py",
)


def compiler_digest() -> str:
    """Hash of the sources that decide what is compiled: a changed pass makes old bundles miss."""
    paths = [ROOT / name for name in DECIDING] + sorted((ROOT / "passes").glob("*.py"))
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
