"""The key of a bundle: everything its code depends on, by name. Needs no torch and no tracing."""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import replace
from pathlib import Path

from girih.graph.bundle.files import BundleKey
from girih.kernels.base.cache_dir import cache_dir
from girih.graph.tiles.settings import MAX_STEP_TOKENS, inductor_options
from girih.graph.files.spec import ModelSpec
from girih.kernels.build.sources import source_digest
from girih.kernels.base.target import Target
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
    "graph/tiles/settings.py",
    "graph/tiles/worker.py",
    "graph/adapt/adaptations.py",
    "graph/adapt/adapted_classes.py",
    "graph/trace/call_form.py",
    "graph/adapt/capture.py",
    "graph/weights/conversions.py",
    "graph/trace/eager_modules.py",
    "graph/trace/eager_verify.py",
    "graph/trace/exported_weights.py",
    "graph/tiles/inductor.py",
    "graph/adapt/mask_request.py",
    "graph/ir/opaque.py",
    "graph/trace/open_calls.py",
    "graph/ir/order.py",
    "graph/partition/partition.py",
    "graph/adapt/pooled_model.py",
    "graph/ir/program.py",
    "graph/adapt/recurrent_functions.py",
    "graph/adapt/rotary.py",
    "graph/files/rotary_facts.py",
    "graph/files/spec.py",
    "graph/trace/stamp.py",
    "graph/files/task.py",
    "graph/ir/text.py",
    "graph/ir/tile_file.py",
    "graph/trace/trace.py",
    "graph/ir/weight_plan.py",
    "kernels/attention/backends.py",
    "kernels/ops/eager.py",
    "kernels/ops/experts.py",
    "kernels/kv/layout.py",
    "kernels/ops/schemas.py",
    "kernels/ops/packing.py",
    "kernels/ops/state.py",
)


def compiler_digest() -> str:
    """Hash of the sources that decide what is compiled: a changed pass makes old bundles miss."""
    paths = [ROOT / name for name in DECIDING] + sorted((ROOT / "passes").glob("*.py"))
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
