"""Where a model's files are: one string in, a directory and its weight files out.

Owns: what kinds of source there are and the order in which a string is read as one. Must not know
tensors or graphs (`checkpoint` opens what is found here), and imports no torch.

    smollm2, gemma3_270m,  built-in: fetched once (`fetch`)
    minilm
    a directory            config.json + *.safetensors
    a .gguf file           config and tokenizer converted once, weights read from the file
    org/name               the local Hugging Face cache, then the hub

Built-in names win over a directory of the same name; write ./smollm2 for the directory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.graph.files.fetch import (
    CONVERSION,
    builtin_names,
    builtin_path,
    fetch_model,
    make_directory,
)
from girih.graph.files.gguf_file import GgufHeader, read_gguf_header
from girih.graph.files.gguf_names import family_of
from girih.graph.files.safetensors_file import read_header
from girih.kernels.base.cache_dir import cache_dir
from girih.kernels.base.errors import SourceError, WeightError
from girih.kernels.base.names import did_you_mean
from girih.kernels.base.progress import Progress, ProgressEvent, no_progress

INDEX_NAME = "model.safetensors.index.json"
MODEL_DTYPES = ("bfloat16", "float16", "float32")
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
HUB_IGNORED = ("*/*", "consolidated*")  # other formats and second copies of the weights
# What is read in folders: named chat templates; how sentence-transformers pools, and its layers.
HUB_FOLDER_PATTERNS = (
    "additional_chat_templates/*.jinja",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
)


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model.

    Attributes:
        path: directory with config.json and the tokenizer files.
        weights: safetensors files; empty when the weights are in `gguf`.
        gguf: the GGUF file with the weights, or None.
        name: what to call the model when the user gives no name.
        dtype: the checkpoint's own precision: "bfloat16", "float16" or "float32".
    """

    path: Path
    weights: tuple[Path, ...]
    gguf: Path | None
    name: str
    dtype: str


def resolve_source(source: str, progress: Progress = no_progress) -> ModelFiles:
    """Find a model's files.

    Args:
        source: a built-in name, a directory, a .gguf file, or a hub id (see the module).
        progress: called while files are fetched or converted.

    Raises:
        SourceError: nothing usable is there; the message says what was looked at.
        WeightError: the weights are there but damaged or incomplete.
    """
    source = _text(source)
    if source in builtin_names():
        return _resolve_builtin(source, progress)
    path = _local_path(source)
    if path is None:
        return _resolve_hub(source, progress)
    return resolve_directory(path) if path.is_dir() else _resolve_file(path, progress)


def check_source(source: str) -> bool:
    """Refuse what cannot be a model, as far as this machine tells, and without much work.

    Returns:
        Whether its directory is here, so that `resolve_source` only looks at it.

    Raises:
        SourceError, WeightError: as `resolve_source`; nothing is fetched or converted.
    """
    source = _text(source)
    path = builtin_path(source) if source in builtin_names() else _local_path(source)
    if path is not None and path.is_file():
        _gguf_header(path)
    is_here = path is not None and path.is_dir()
    if is_here:
        resolve_source(source)
    return is_here


def _text(source: Any) -> str:
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if not isinstance(source, str):
        raise SourceError(f"the model's source is {source!r}; it must be text: {_allowed()}")
    return source


def _local_path(source: str) -> Path | None:
    """Where a source is on this machine, or None when it is an id of the hub.

    Raises:
        SourceError: it is neither.
    """
    try:
        path = Path(source).expanduser()
        is_here = bool(source) and (path.is_dir() or path.is_file())
    except (OSError, RuntimeError) as error:  # no permission, too long a name, no such user
        raise SourceError(f"model path {source[:200]} cannot be looked at: {error}") from error
    if is_here:
        return path
    on_hub = re.match(
        r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", source
    )
    if on_hub is not None:
        raise SourceError(f"{source} is an address; name the model by its id: {on_hub[1]}")
    if "://" in source:
        raise SourceError(
            f"{source} is an address, not a model; `girih chat url=URL` talks to a server, and a "
            f"model is {_allowed()}"
        )
    if source.startswith(("/", ".", "~")) or source.endswith((".gguf", ".safetensors")):
        raise SourceError(f"model path {source} does not exist (looked at {path.absolute()})")
    if not is_hub_id(source):
        raise SourceError(_unknown_message(source))
    return None


def is_hub_id(source: str) -> bool:
    """Return whether a source is written as a model of the hub, and nothing on this machine is."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) is not None and not os.path.exists(source)


def _resolve_builtin(name: str, progress: Progress) -> ModelFiles:
    path = fetch_model(name, progress)
    try:
        return resolve_directory(path, name)
    except SourceError as exc:
        raise SourceError(f"{exc}; delete {path} to fetch {name} again") from exc


def _unknown_message(source: str) -> str:
    hint = did_you_mean(source.lower(), builtin_names(), cutoff=0.4)
    if "/" in source:
        hint += f"nothing is at {Path(source).absolute()}; "
    return f"unknown model {source!r}: {hint}it must be {_allowed()}"


def _allowed() -> str:
    return (
        f"a built-in name ({', '.join(builtin_names())}), a directory with config.json, a .gguf "
        "file, or a hub id such as org/name"
    )


def _gguf_header(path: Path) -> GgufHeader:
    if path.suffix.lower() != ".gguf":
        raise SourceError(
            f"{path} is a file, but not a .gguf file; give the directory that holds config.json "
            "and the weights"
        )
    header = read_gguf_header(path)
    family_of(header.metadata, str(path))
    return header


def _resolve_file(path: Path, progress: Progress) -> ModelFiles:
    header = _gguf_header(path)

    def build(target: Path) -> None:
        from girih.graph.files.gguf_convert import convert_gguf_parts

        progress(ProgressEvent("convert", 0, 1, f"config and tokenizer of {path.name}"))
        convert_gguf_parts(path, target)
        progress(ProgressEvent("convert", 1, 1, f"config and tokenizer of {path.name}"))

    # Its digest covers all that config and tokenizer are made from, so it is an exact key.
    name = re.sub(r"[^\w.-]", "_", path.stem)
    directory = cache_dir() / "gguf" / f"{name}-{header.digest[:16]}-{CONVERSION}"
    return ModelFiles(
        path=make_directory(directory, build, progress),
        weights=(),
        gguf=path,
        name=path.stem,
        dtype=header.model_dtype(),
    )


def _resolve_hub(repo: str, progress: Progress) -> ModelFiles:
    """A hub model from the local cache if all of it is there, else from the hub."""
    name = repo.rpartition("/")[2]
    try:
        return resolve_directory(_hub_snapshot(repo, local=True), name)
    except (SourceError, OSError, ValueError) as exc:
        in_cache = _first_line(exc).partition(". ")[0]
    progress(ProgressEvent("download", 0, None, repo))
    try:
        path = _hub_snapshot(repo, local=False)
    except Exception as exc:  # the hub client raises its HTTP library's errors, which may change
        raise SourceError(
            f"cannot get model {repo!r}: it is no local path, the local Hugging Face cache does "
            f"not have it ({in_cache}), and the hub did not deliver it ({_first_line(exc)}); check "
            "the name and the network, or give a local directory"
        ) from exc
    return resolve_directory(path, name)


def _first_line(exc: Exception) -> str:
    lines = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {lines[0] if lines else ''}"


def _hub_snapshot(repo: str, local: bool) -> Path:
    from huggingface_hub import snapshot_download

    path = Path(
        snapshot_download(
            repo,
            allow_patterns=list(HUB_PATTERNS),
            ignore_patterns=list(HUB_IGNORED),
            local_files_only=local,
        )
    )
    snapshot_download(repo, allow_patterns=list(HUB_FOLDER_PATTERNS), local_files_only=local)
    return path


def resolve_directory(path: Path, name: str | None = None) -> ModelFiles:
    """Read a Hugging Face directory: config.json beside safetensors files.

    Raises:
        SourceError: no config.json, no safetensors files, or unreadable JSON.
        WeightError: the index names a shard that is not there.
    """
    config_path = path / "config.json"
    if not config_path.is_file():
        hint = "; give the .gguf file itself" if any(path.glob("*.gguf")) else ""
        raise SourceError(
            f"{path} is not a model directory: it has no config.json "
            f"({_describe_content(path)}){hint}"
        )
    config = read_json(config_path)
    weights = _find_weights(path)
    return ModelFiles(
        path=path,
        weights=weights,
        gguf=None,
        name=name or _name_of(path.resolve()),
        dtype=_checkpoint_dtype(config, weights),
    )


def _name_of(path: Path) -> str:
    """Return the name of the model in a directory.

    The directories of built-in models, and snapshots in a cache of the hub, have names of their
    own; whoever names one of them means the model.
    """
    if path.parent == (cache_dir() / "models").resolve():
        builtin = path.name.rpartition("-")[0]
        return builtin if builtin in builtin_names() else path.name
    repo = path.parent.parent.name
    if path.parent.name == "snapshots" and repo.startswith("models--"):
        return repo.rpartition("--")[2]
    return path.name


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        SourceError: the file cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise SourceError(f"cannot read {path} as JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise SourceError(f"{path} must hold a JSON object, but holds a {type(value).__name__}")
    return value


def whole_number(config: Mapping[str, Any], key: str, file: Path) -> int | None:
    """The whole number that a configuration has for `key`, or None where it has none or null.

    Args:
        config: what was read.
        key: its name there.
        file: where it was read, for the message.

    Raises:
        SourceError: something else is there.
    """
    value = config.get(key)
    if value is None or type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise SourceError(f"{file}: {key} is {value!r}; it must be a whole number")


def read_index(path: Path) -> dict[str, str]:
    """Read a sharded checkpoint's index: tensor name → shard file name.

    Raises:
        SourceError: the index is unreadable, has no weight_map, or one that names no files.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path} has no 'weight_map' that names the shards")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise SourceError(
                f"{path}: 'weight_map' has {shard!r} for tensor {tensor!r}; it must be the name of "
                "a shard file"
            )
    return weight_map


def _find_weights(path: Path) -> tuple[Path, ...]:
    single = path / "model.safetensors"
    if single.is_file():
        return (single,)
    index = path / INDEX_NAME
    if index.is_file():
        shards = [path / shard for shard in dict.fromkeys(read_index(index).values())]
        _require_shards(shards, index.name)
        return tuple(shards)
    # Mistral ships a second copy under its own names in consolidated*.safetensors.
    found = [p for p in sorted(path.glob("*.safetensors")) if "consolidated" not in p.name]
    if not found:
        raise SourceError(_no_weights_message(path))
    numbered = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.safetensors", found[0].name)
    if numbered:
        stem, count = numbered[1], int(numbered[2])
        found = [path / f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        _require_shards(found, "the file names' '-of-' count")
    return tuple(found)


def _require_shards(shards: list[Path], who: str) -> None:
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise WeightError(
            f"{shards[0].parent} misses {len(missing)} of {len(shards)} weight files promised by "
            f"{who}: {', '.join(missing[:3])}; download the model again"
        )


def _no_weights_message(path: Path) -> str:
    old = sorted(p.name for p in path.glob("*.bin")) + sorted(p.name for p in path.glob("*.pth"))
    if old:
        return (
            f"{path} holds its weights only as pickle files ({', '.join(old[:3])}), which are not "
            "read because they can run code; save the model again with "
            "save_pretrained(..., safe_serialization=True)"
        )
    return f"{path} has a config.json but no *.safetensors files ({_describe_content(path)})"


def _describe_content(path: Path) -> str:
    names = sorted(p.name + ("/" if p.is_dir() else "") for p in path.iterdir())
    if not names:
        return "it is empty"
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"it holds {shown}"


def _checkpoint_dtype(config: dict[str, Any], weights: tuple[Path, ...]) -> str:
    """The config's dtype, else the one most bytes of the first file have, else float32."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            declared = part.get("dtype") or part.get("torch_dtype")
            if declared in MODEL_DTYPES:
                return str(declared)
    num_bytes = dict.fromkeys(MODEL_DTYPES, 0)
    for stored in read_header(weights[0]).values():
        if stored.dtype in num_bytes:
            num_bytes[stored.dtype] += stored.num_bytes
    best = max(num_bytes, key=lambda dtype: num_bytes[dtype])
    return best if num_bytes[best] else "float32"
