"""Building and loading: other instruction sets, self-test, no compiler, damaged files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from girih.kernels.base.errors import CompileError, ConfigError
from girih.kernels.base.target import detect_isa
from girih.kernels.build import library
from girih.kernels.build import sources as library_sources

HERE = Path(__file__).parent


KERNELS = [path for path in library_sources.sources("*.cpp") if path.name != "binding.cpp"]


@pytest.mark.parametrize(
    "isa", ["generic", pytest.param("avx512", marks=pytest.mark.slow), "amx_bf16"]
)
def test_kernels_compile_for(isa, tmp_path):
    """The binding is the same for all, so it is left out; this machine need not run the code."""
    flags = (*library_sources.COMMON_FLAGS, *library_sources.ISA_FLAGS[isa], "-O0")
    for source in KERNELS:
        built = library._compile(library.require_compiler(), flags, tmp_path, source)
        assert built.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_lesser_instruction_sets_compute_the_same(isa):
    """The op tests once more, in a process whose library is not the best for this machine."""
    if isa == detect_isa():
        pytest.skip("the other tests of this folder run it")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            *(str(HERE / "test_ops.py"), str(HERE / "test_packing.py")),
        ],
        env={**os.environ, "GIRIH_TEST_ISA": isa},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout


# The system does not permit tiles while a thread's stack for signals is too small for them.
WITHOUT_TILES = """
import ctypes, logging, sys
from pathlib import Path
import torch
from girih.kernels.build import library
from girih.kernels.ops import packing
from girih.kernels.ops import reference
logging.basicConfig(format="%(levelname)s %(message)s")
class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
library.load_library(Path(sys.argv[1]))
library.load_library(Path(sys.argv[1]))
packed = torch.zeros(packing.packed_shape(40, 75, torch.bfloat16, "amx_bf16"), dtype=torch.bfloat16)
torch.ops.girih.pack_linear_(packed, torch.eye(40, 75).bfloat16(), 0)
x = torch.randn(20, 75).bfloat16()
assert torch.equal(torch.ops.girih.packed_linear(x, packed, None, 40), x[:, :40])
"""


@pytest.mark.skipif(detect_isa() != "amx_bf16", reason="needs a processor with AMX")
def test_vectors_serve_where_tiles_are_not_permitted(built):
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TILES, str(built.path)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("WARNING products by AMX tiles are not permitted") == 1


def test_a_library_that_multiplies_wrongly_is_refused(built, tmp_path):
    assert library._self_test(built.path) == 0
    with pytest.raises(CompileError, match=r"kernels\.so computes wrong products.*target\.isa"):
        library._judge(tmp_path / "kernels.so", 2)


def test_load_is_idempotent_and_exclusive(built, tmp_path):
    library.load_library(built.path)
    same = tmp_path / "same.so"
    same.write_bytes(built.path.read_bytes())
    library.load_library(same)
    assert library.is_loaded() and library._loaded == built.path.resolve()
    other = tmp_path / "other.so"
    other.write_bytes(b"something else")
    with pytest.raises(CompileError, match="already uses"):
        library.load_library(other)
    same.unlink()
    with pytest.raises(CompileError, match=r"same\.so does not exist"):
        library.load_library(same)


def test_damaged_library_leaves_the_references(tmp_path):
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"\x7fELF nonsense")
    code = f"""
import torch
from girih.kernels.build import library
from girih.kernels.ops import packing
from girih.kernels.base.errors import CompileError
try:
    library.load_library({str(damaged)!r})
except CompileError as error:
    assert "cannot be loaded" in str(error)
else:
    raise SystemExit("loaded a damaged file")
packed = torch.zeros(packing.packed_shape(4, 3, torch.float32, "avx2"))
torch.ops.girih.pack_linear_(packed, torch.eye(4, 3), 0)
print(torch.ops.girih.packed_linear(torch.ones(1, 3), packed, None, 4).tolist())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[[1.0, 1.0, 1.0, 0.0]]"


def test_no_path_of_the_building_machine_in_the_library(built):
    content = built.path.read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in content


def test_missing_compiler_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match=r"no-such-compiler.*install"):
        library.build_library("avx2", tmp_path / "kernels.so")


def test_clang_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    clang = tmp_path / "c++"
    clang.write_text("#!/bin/sh\necho 'Debian clang version 19.1.7 (3)'\n")
    clang.chmod(0o755)
    monkeypatch.setenv("CXX", str(clang))
    with pytest.raises(CompileError, match=r"is clang; .* g\+\+ only: install it"):
        library.require_compiler()


def test_compiler_errors_are_shown(tmp_path):
    with pytest.raises(CompileError, match="no-such-option"):
        library.build_library("avx2", tmp_path / "kernels.so", ("-fno-such-option",))
    assert list(tmp_path.iterdir()) == []


def test_unknown_isa(tmp_path):
    with pytest.raises(ConfigError, match="'mmx'"):
        library.build_library("mmx", tmp_path / "kernels.so")


def test_digest_covers_sources_and_flags(monkeypatch):
    before = library_sources.source_digest()
    assert before == library_sources.source_digest() and len(before) == 64
    monkeypatch.setattr(library_sources, "COMMON_FLAGS", (*library_sources.COMMON_FLAGS, "-DX"))
    assert library_sources.source_digest() != before


@pytest.mark.parametrize(("level", "whole"), [("v3", False), ("v4", True)])
def test_lean_headers_serve_avx2_only(level, whole):
    command = [
        library.require_compiler(),
        f"-march=x86-64-{level}",
        f"-I{library_sources.LEAN_HEADERS}",
    ]
    macros = subprocess.run(
        [*command, "-dM", "-E", "-x", "c++", "-"],
        input="#include <immintrin.h>\n#include <immintrin.h>\n",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "_AVX2INTRIN_H_INCLUDED" in macros and "_FMAINTRIN_H_INCLUDED" in macros
    assert ("_AVX512FINTRIN_H_INCLUDED" in macros) is whole
