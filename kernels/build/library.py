"""Building and loading the C++ kernel library.

`build_library` needs a C++ compiler and torch's headers; `load_library` needs neither, so a
bundle that carries the library starts on a machine without a compiler. The library links torch by
its SONAME only: no path of the building machine is in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from girih.kernels.base.errors import CompileError, ConfigError
from girih.kernels.base.target import ISAS, find_compiler
from girih.kernels.build.sources import (
    BINDING_FLAGS,
    COMMON_FLAGS,
    ISA_FLAGS,
    OWN_UNITS,
    SOURCE_DIR,
    sources,
)
from girih.kernels.ops import schemas as ops

log = logging.getLogger("girih.kernels")

_compilers: set[subprocess.Popen[str]] = set()  # running ones
_loaded: Path | None = None
_loaded_bytes = b""  # SHA-256 of it; the file may have been moved since


def is_loaded() -> bool:
    """Return whether the C++ kernels are the CPU kernels of this process."""
    return _loaded is not None


def load_library(path: Path) -> None:
    """Load a built library; its kernels replace the references on the CPU. Idempotent.

    Every way to multiply that the library has is tried on known answers first. Where AMX tiles
    fail, the vector code takes their place and a warning says so.

    Raises:
        CompileError: the file cannot be loaded, another library already is, or it computes wrongly.
    """
    global _loaded, _loaded_bytes
    path = Path(path).resolve()
    if not path.is_file():
        raise CompileError(f"kernel library {path} does not exist; build it first")
    if _loaded is not None:
        if _digest(path) == _loaded_bytes:
            return
        raise CompileError(
            f"kernel library {path} cannot be loaded: this process already uses {_loaded}; "
            "one process serves one library"
        )
    ops.drop_references()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        ops.register_references()
        raise CompileError(f"kernel library {path} cannot be loaded: {error}") from error
    _judge(path, _self_test(path))
    _loaded, _loaded_bytes = path, _digest(path)


def _self_test(path: Path) -> int:
    """Have the loaded library choose how it multiplies; its code of what cannot be used."""
    code: int = ctypes.CDLL(str(path)).girih_self_test()
    return code


def _judge(path: Path, code: int) -> None:
    if code == 1:
        log.warning(
            "products by AMX tiles are not permitted or not right on this machine; the slower "
            "AVX-512 code runs instead (target.isa=avx512_bf16 chooses it without this warning)"
        )
    elif code:
        raise CompileError(
            f"kernel library {path} computes wrong products on this machine; delete it and build "
            "again, or build for fewer instructions, e.g. target.isa=generic"
        )


def build_library(isa: str, out_path: Path, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compile the CPU kernels for an instruction set and put the library at `out_path`.

    The file appears atomically. Other instruction sets than this machine's can be built too.

    Args:
        isa: one of `girih.kernels.base.target.ISAS`.
        out_path: the shared object to write; its directory is created.
        extra_flags: appended to the compiler's flags (tests use it).

    Raises:
        ConfigError: an unknown instruction set.
        CompileError: no compiler, or the compiler failed (its first errors are in the message).
    """
    if isa not in ISA_FLAGS:
        raise ConfigError(f"isa is {isa!r}; the kernel library exists for {', '.join(ISAS)}")
    compiler = require_compiler()
    out_path = Path(out_path)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    flags = (*COMMON_FLAGS, *ISA_FLAGS[isa], *extra_flags)
    with tempfile.TemporaryDirectory(dir=out_path.parent, prefix=".kernels-") as scratch:
        work = Path(scratch)
        compile_one = functools.partial(_compile, compiler, flags, work)
        with ThreadPoolExecutor(max_workers=2) as pool:
            objects = list(pool.map(compile_one, _units(work)))
        linked = work / "library.so"
        libraries = Path(torch.__file__).parent / "lib"
        _run(
            [
                *(compiler, "-shared", "-fopenmp", "-o", str(linked)),
                *map(str, objects),
                *(f"-L{libraries}", "-ltorch_cpu"),
            ]
        )
        os.replace(linked, out_path)
    return out_path


def stop_builds() -> None:
    """End the compilers that run, and so every `build_library` with an error."""
    for compiler in list(_compilers):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(compiler.pid, signal.SIGKILL)  # g++ runs programs of its own


def require_compiler() -> str:
    """Return the compiler's command.

    Raises:
        CompileError: it is not on PATH, or is no g++; says what to install.
    """
    compiler = find_compiler()
    if shutil.which(compiler) is None:
        raise CompileError(
            f"the kernel library cannot be built: no C++ compiler {compiler!r} on PATH; install "
            "one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or name "
            "yours in CXX"
        )
    if "clang" in _version(compiler):
        raise CompileError(
            f"{compiler!r} is clang; the kernels and Inductor are compiled with g++ only: install "
            "it (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++), or name yours "
            "in CXX"
        )
    return compiler


@functools.lru_cache(maxsize=4)
def _version(compiler: str) -> str:
    """The first line a compiler says of itself."""
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return said.stdout.partition("\n")[0]


def _units(work: Path) -> list[Path]:
    """The files to compile; the one that joins the small sources is written to `work`."""
    joined = work / "joined.cpp"
    small = [path.name for path in sources("*.cpp") if path.name not in OWN_UNITS]
    joined.write_text("".join(f'#include "{name}"\n' for name in small))
    return [*(SOURCE_DIR / name for name in OWN_UNITS), joined]


def _compile(compiler: str, flags: tuple[str, ...], work: Path, source: Path) -> Path:
    target = work / (source.stem + ".o")
    if source.name == "binding.cpp":
        flags += BINDING_FLAGS
    places = {"sources": SOURCE_DIR, "include": Path(torch.__file__).parent / "include"}
    command = [compiler, *(flag.format(**places) for flag in flags)]
    _run([*command, "-c", str(source), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    if shutil.which("nice"):  # builds run beside tracing, which must not wait for them
        command = ["nice", "-n", "10", *command]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as compiler:
        _compilers.add(compiler)
        try:
            messages = compiler.communicate()[1]
        finally:
            _compilers.discard(compiler)
    if compiler.returncode == 0:
        return
    lines = messages.splitlines()
    errors = [line for line in lines if "error" in line.lower()] or lines
    told = "\n".join(errors[:8])
    raise CompileError(
        f"the kernel library could not be built: {command[0]} ended with status "
        f"{compiler.returncode}:\n{told}\ncommand: {' '.join(command)}"
    )


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
