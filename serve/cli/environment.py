"""A report on this machine for bug reports; nothing in it is secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from girih import __version__
from girih.kernels.base.cache_dir import cache_dir
from girih.kernels.base.target import PRODUCTS, find_compiler, resolve_target

PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "gguf",
    "numpy",
    "hydra-core",
    "fastapi",
    "uvicorn",
    "msgspec",
    "xgrammar",
    "llguidance",
    "triton",
)
VARIABLES = (
    "GIRIH_",
    "OMP_",
    "GOMP_",
    "MKL_",
    "TORCH",
    "KMP_",
    "CXX",
    "CUDA_VISIBLE_DEVICES",
    "LD_PRELOAD",
)
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
Report = dict[str, dict[str, str]]


def environment_report() -> Report:
    """Return the report: section -> name -> value."""
    return {
        "girih": dict(_software()),
        "machine": dict(_machine()),
        "cache": dict(_cache(cache_dir())),
        "models": dict(_models(cache_dir() / "models")),
        "variables": dict(_variables()),
    }


def as_text(report: Report) -> str:
    """Return the report as lines that can be pasted; the home directory is written `~`."""
    lines: list[str] = []
    for section, values in report.items():
        lines.append(section)
        lines += [f"  {name:<14} {value}" for name, value in values.items()] or ["  (none)"]
    return "\n".join(lines).replace(str(Path.home()), "~")


def _software() -> Iterator[tuple[str, str]]:
    root = Path(__file__).parents[2]
    is_checkout = (root / ".git").exists()  # a wheel may lie inside somebody else's repository
    commit = is_checkout and _output("git", "-C", str(root), "log", "-1", "--format=%h %cs")
    yield "girih", f"{__version__} ({commit})" if commit else __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", platform.platform()
    yield "processor", _processor()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    target = resolve_target()
    yield "cores", f"{os.cpu_count()}, {usable} usable, {target.threads} compute threads"
    yield "memory", _memory()
    yield "instructions", f"{target.isa}: {PRODUCTS[target.isa]}"
    compiler = find_compiler()
    yield "compiler", _output(compiler, "--version") or f"{compiler} is not installed"
    accelerators = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    yield "accelerator", accelerators or "none seen"


def _processor() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return match.group(1) if match else platform.processor() or platform.machine()


def _memory() -> str:
    text = _text("/proc/meminfo")
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.MULTILINE))
    if len(found) < 2:
        return "unknown"
    total, free = (int(found[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return f"{readable_bytes(total)}, {readable_bytes(free)} available"


def _cache(root: Path) -> Iterator[tuple[str, str]]:
    yield "directory", str(root)
    if not root.is_dir():
        return
    yield "free disk", readable_bytes(shutil.disk_usage(root).free)
    for entry in sorted(root.iterdir()):
        if entry.is_dir():
            count = sum(1 for inner in entry.iterdir() if not inner.name.startswith("."))
            entries = "1 entry" if count == 1 else f"{count} entries"
            yield entry.name, f"{entries}, {readable_bytes(size_of(entry))}"


def _models(root: Path) -> Iterator[tuple[str, str]]:
    if root.is_dir():
        for entry in sorted(root.iterdir()):
            if entry.is_dir():
                yield entry.name, readable_bytes(size_of(entry))


def _variables() -> Iterator[tuple[str, str]]:
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            is_secret = any(word in name for word in SECRET)
            yield name, "(hidden)" if is_secret else os.environ[name]


def size_of(root: Path) -> int:
    """Return the bytes of all files below a directory (links are not followed)."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue  # removed while we looked
    return total


def readable_bytes(count: float) -> str:
    """Return a size for people, e.g. "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def _output(*command: str) -> str:
    """Return the first line a command prints, "" when it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else ""
