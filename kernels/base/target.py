"""The compile target: device, CPU instruction set or GPU architecture, threads, compiler.

Owns the list of instruction sets and their compiler flags' names. Knows nothing of models.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from girih.kernels.base.errors import ConfigError

ISAS = ("generic", "avx2", "avx512", "avx512_bf16", "amx_bf16")
"""Known instruction sets; on x86-64 each contains those before it."""

PRODUCTS = {
    "generic": "bfloat16 widened to float32, SSE2",
    "avx2": "bfloat16 widened to float32, AVX2",
    "avx512": "bfloat16 widened to float32, AVX-512",
    "avx512_bf16": "bfloat16 widened to float32, AVX-512",
    "amx_bf16": "bfloat16 by AMX tiles",
}
"""The kernels' way to multiply bfloat16, the dtype of most models."""

# /proc/cpuinfo flags that the code of an instruction set may use (x86-64-v3, v4, + bf16, + AMX).
_NEEDS = {
    "avx2": {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"},
    "avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16"},
    "amx_bf16": {"amx_tile", "amx_bf16"},
}


@dataclass(frozen=True)
class Target:
    """The target of compilation; every field belongs in a compile key.

    Attributes:
        device: "cpu" or "cuda".
        isa: one of `ISAS`; of the host for "cuda".
        threads: compute threads, at least 1.
        compiler: which C++ compiler, not which version or path, and not probed: loading needs none.
        fast_math: generated code need not round where the model rounds.
        arch: GPU architecture, e.g. "sm_90"; "" on the CPU.
    """

    device: str
    isa: str
    threads: int
    compiler: str
    fast_math: bool = False
    arch: str = ""


def detect_isa() -> str:
    """Return the best instruction set this machine runs."""
    flags = _cpu_flags()
    best = "generic"
    for isa in ISAS[1:]:
        if not _NEEDS[isa] <= flags:
            break
        best = isa
    return best


def why_not_runnable(isa: str) -> str | None:
    """Return why code for `isa` cannot run on this machine, or None when it can."""
    here = detect_isa()
    if isa == "generic" or ISAS.index(isa) <= ISAS.index(here):
        return None
    return f"this processor supports {here!r} at most"


def find_compiler() -> str:
    """Return the C++ compiler's command: $CXX, else g++ (found or not)."""
    return os.environ.get("CXX") or "g++"


def compiler_family() -> str:
    """Return "g++" for every command of that name ("/usr/bin/g++-13"), else the command's name."""
    name = Path(find_compiler()).name
    return "g++" if re.fullmatch(r"(.+-)?(g|c)\+\+(-\d+)?", name) else name


def resolve_target(
    device: str = "cpu", isa: str = "auto", threads: int = 0, arch: str = "auto"
) -> Target:
    """Turn every automatic choice into a value.

    Args:
        device: "cpu" or "cuda".
        isa: "auto" or one of `ISAS`.
        threads: 0 takes torch's thread count.
        arch: "auto" asks the GPU of this machine; else its architecture, e.g. "sm_90".

    Raises:
        ConfigError: a value that is not allowed.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"target.device is {device!r}; it must be 'cpu' or 'cuda'")
    if isa != "auto" and isa not in ISAS:
        raise ConfigError(f"target.isa is {isa!r}; it must be 'auto' or one of {', '.join(ISAS)}")
    if threads < 0:
        raise ConfigError(f"target.threads is {threads}; it must be 0 (automatic) or more")
    return Target(
        device=device,
        isa=detect_isa() if isa == "auto" else isa,
        threads=threads or _default_threads(),
        compiler=compiler_family(),
        arch=_resolve_arch(arch) if device == "cuda" else "",
    )


def require_runnable(target: Target) -> None:
    """Check that code for a target can run in this process.

    Raises:
        ConfigError: it cannot; says why, and that it can be built here all the same.
    """
    if target.device != "cpu":
        raise ConfigError(
            f"target.device is {target.device!r}: this version runs on 'cpu' only; "
            f"`girih compile target={target.device}` prepares what can be prepared without a GPU"
        )
    reason = why_not_runnable(target.isa)
    if reason:
        raise ConfigError(
            f"target.isa is {target.isa!r}, but {reason}; leave it at 'auto' here, or build for "
            f"the other machine with `girih compile target.isa={target.isa} bundle=DIR`"
        )


def _default_threads() -> int:
    """Return torch's own choice. Only what is left to torch imports it: a key is had without."""
    import torch

    threads: int = torch.get_num_threads()
    return threads


def _resolve_arch(arch: str) -> str:
    if arch != "auto":
        if not re.fullmatch(r"sm_\d{2,3}a?", arch):
            raise ConfigError(f"target.arch is {arch!r}; it must be 'auto' or like 'sm_90'")
        return arch
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("this machine has no GPU to ask; name one, e.g. target.arch=sm_90")
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _cpu_flags() -> set[str]:
    """Return the processor's feature names as Linux spells them (empty when unknown)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return set()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()
