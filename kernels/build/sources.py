"""The sources of the kernel library and how they are compiled, as data. Needs no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCE_DIR = Path(__file__).parents[1] / "cpu"
# Headers that stand before the system's, for code of an AVX2 machine: they are read faster.
LEAN_HEADERS = SOURCE_DIR / "lean"

COMMON_FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
    "-Wno-psabi",
    # Messages name source files; the library must not tell where it was built.
    "-ffile-prefix-map={sources}=kernels",
    "-I{sources}",
    "-I{sources}/lean",
)
ISA_FLAGS = {
    "generic": ("-DGIRIH_LANES=8",),
    "avx2": ("-DGIRIH_LANES=8", "-march=x86-64-v3"),
    "avx512": ("-DGIRIH_LANES=16", "-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx512_bf16": (
        "-DGIRIH_LANES=16",
        "-march=x86-64-v4",
        "-mavx512bf16",
        "-mprefer-vector-width=512",
    ),
    "amx_bf16": (
        "-DGIRIH_LANES=16",
        "-march=x86-64-v4",
        "-mavx512bf16",
        "-mamx-tile",
        "-mamx-bf16",
        "-mprefer-vector-width=512",
    ),
}
# Compiled each by itself, the longest first. All other sources are one unit: reading headers takes
# small files longer than their own code.
OWN_UNITS = ("attention.cpp", "binding.cpp")
# The oldest torch whose stable C++ interface the binding uses (2.11).
BINDING_FLAGS = (
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-I{include}",
    "-ffile-prefix-map={include}=include",
    "-O1",  # it only checks; compile time matters more
)


def source_digest() -> str:
    """Return the SHA-256 (hex) of the library's sources and compiler flags."""
    digest = hashlib.sha256()
    for path in (*sources("*"), *sorted(LEAN_HEADERS.iterdir())):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((COMMON_FLAGS, sorted(ISA_FLAGS.items()), BINDING_FLAGS)).encode())
    return digest.hexdigest()


def sources(pattern: str) -> list[Path]:
    """The C++ files of the library that match."""
    return sorted(path for path in SOURCE_DIR.glob(pattern) if path.suffix in (".cpp", ".h"))
