"""The key of a bundle: everything its code depends on, by name. Needs no torch and no tracing."""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import replace
from pathlib import Path

from girih.graph.bundle.files import BundleKey
from girih.graph.files.spec import ModelSpec
from girih.graph.tiles.settings import MAX_STEP_TOKENS, inductor_options
from girih.kernels.base.cache_dir import cache_dir
from girih.kernels.base.target import Target
from girih.kernels.build.sources import source_digest
from girih.passes.options import PASS_NAMES, OptConfig

ROOT = Path(__file__).resolve().parents[2]


def bundle_key(spec: ModelSpec, opt: OptConfig, target: Target) -> BundleKey:
    """Return the key of everything that the compiled code depends on."""
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


# What decides what is compiled: folders, each with all it holds, and single files.
DECIDING = (
    "graph/adapt",
    "graph/files/rotary_facts.py",
    "graph/files/spec.py",
    "graph/files/task.py",
    "graph/ir",
    "graph/partition",
    "graph/tiles",
    "graph/trace",
    "graph/weights/conversions.py",
    "kernels/attention",
    "kernels/kv/layout.py",
    "kernels/ops",
    "passes",
)


def compiler_digest() -> str:
    """Hash of the sources that decide what is compiled: a changed pass makes old bundles miss."""
    digest = hashlib.sha256()
    for path in deciding_files():
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def deciding_files() -> list[Path]:
    """The files of `DECIDING`, in one order."""
    found = {
        path
        for name in DECIDING
        for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*"))
        if path.is_file() and path.suffix in (".py", "") and "__pycache__" not in path.parts
    }
    return sorted(found)
