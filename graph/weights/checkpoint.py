"""The tensors of one model, read one at a time.

Owns: which file holds which tensor, and the only place where a tensor name is resolved. Must not
know the graph, packing, or where the files came from (that is `sources`).

    ModelFiles ──open_checkpoint──► Checkpoint ──read(name, dtype)──► torch.Tensor (yours to keep)

Nothing is held between reads: resident memory is what the caller kept plus the tensor being read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Protocol

import torch

from girih.graph.files.gguf_file import GgufFile
from girih.graph.files.safetensors_file import SafetensorsFile
from girih.graph.files.sources import INDEX_NAME, ModelFiles, read_index
from girih.kernels.base.errors import WeightError
from girih.kernels.base.names import nearest_names


class TensorFile(Protocol):
    """A file of named tensors, whatever its format."""

    def names(self) -> list[str]:
        """Tensor names, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor the file has."""
        ...

    def dtype(self, name: str) -> str:
        """Element type as stored, by torch's name (a quantised tensor: its block type)."""
        ...

    def read(self, name: str, dtype: str | None) -> torch.Tensor:
        """A new tensor that shares nothing with the file."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class SafetensorsShard:
    """A safetensors file as torch tensors."""

    def __init__(self, file: SafetensorsFile) -> None:
        self._file = file
        self.path = file.path

    def names(self) -> list[str]:
        """Tensor names, in header order."""
        return list(self._file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor the file has."""
        return self._file.tensors[name].shape

    def dtype(self, name: str) -> str:
        """Element type as stored, by torch's name."""
        return self._file.tensors[name].dtype

    def read(self, name: str, dtype: str | None) -> torch.Tensor:
        """A new tensor; `dtype` applies to floating tensors, others keep theirs."""
        stored = self._file.tensors[name]
        if stored.dtype.startswith("float8"):
            raise WeightError(
                f"{self.path}: tensor {name} is stored as {stored.dtype}. Quantised weights are "
                "read from GGUF only; use a bfloat16, float16 or float32 copy"
            )
        raw = torch.empty(stored.num_bytes, dtype=torch.uint8)
        if stored.num_bytes:
            self._file.read_into(name, memoryview(raw.numpy()))
        tensor = raw.view(getattr(torch, stored.dtype)).reshape(stored.shape)
        if dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(getattr(torch, dtype))

    def close(self) -> None:
        """Release the file."""
        self._file.close()


class Checkpoint:
    """Tensors by their Hugging Face names, over one or more files.

    Use as a context manager or call `close`. Reads are safe from several threads.

    Args:
        files: what holds the tensors.
        where: the model's place, for errors.
        index: of a tensor that several files hold, the one to read.
    """

    def __init__(
        self,
        files: list[TensorFile],
        where: str,
        index: Mapping[str, TensorFile] = MappingProxyType({}),
    ) -> None:
        self._files = files
        self._where = where
        self._home: dict[str, TensorFile] = {}
        doubled = set()
        for file in files:
            for name in file.names():
                if self._home.setdefault(name, file) is not file:
                    doubled.add(name)
        for name in sorted(doubled):
            if name not in index or name not in index[name].names():
                raise WeightError(
                    f"{where} holds the tensor {name!r} twice, and no {INDEX_NAME} says which one "
                    "counts; remove the extra weight file"
                )
            self._home[name] = index[name]

    def names(self) -> list[str]:
        """Every tensor name, in file order."""
        return list(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost dimension first; WeightError if there is none."""
        return self._resolve(name).shape(name)

    def dtype(self, name: str) -> str:
        """Element type as stored, e.g. "bfloat16" ("Q4_1" for a quantised GGUF tensor)."""
        return self._resolve(name).dtype(name)

    def read(self, name: str, dtype: str | None = None) -> torch.Tensor:
        """Read one tensor into new memory.

        Args:
            name: the Hugging Face parameter name.
            dtype: element type of the result; None keeps the stored one (float32 for quantised
                tensors). Integer and bool tensors always keep theirs.

        Raises:
            WeightError: no such tensor, or the file is damaged.
        """
        return self._resolve(name).read(name, dtype)

    def close(self) -> None:
        """Release the files; tensors already read stay valid."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _resolve(self, name: str) -> TensorFile:
        file = self._home.get(name)
        if file is None:
            near = nearest_names(name, self._home, 3, cutoff=0.5)
            hint = f"; the nearest names are {', '.join(near)}" if near else ""
            raise WeightError(
                f"{self._where} has no tensor {name!r} among its {len(self._home)}{hint}"
            )
        return file


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Open a model's weights, checking every file's header against its size.

    Raises:
        WeightError: a file is missing, truncated or damaged, or the index does not match it.
        SourceError: a GGUF file has an architecture that is not supported.
    """
    shards: list[TensorFile] = []
    try:
        for path in files.weights:
            shards.append(SafetensorsShard(SafetensorsFile(path)))
        if files.gguf is not None:
            shards.append(GgufFile(files.gguf))
        index = _read_index(files)
        by_path = dict(zip(files.weights, shards, strict=False))
        homes = {name: by_path[path] for name, path in index.items()}
        checkpoint = Checkpoint(shards, str(files.path), homes)
        _check_index(files, index, checkpoint)
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    return checkpoint


def _read_index(files: ModelFiles) -> dict[str, Path]:
    """The file of each tensor as the index of a sharded checkpoint has it; empty without one."""
    path = files.path / INDEX_NAME
    if len(files.weights) < 2 or not path.is_file():
        return {}
    return {name: files.path / shard for name, shard in read_index(path).items()}


def _check_index(files: ModelFiles, index: Mapping[str, Path], checkpoint: Checkpoint) -> None:
    missing = [name for name in index if name not in checkpoint]
    if missing:
        raise WeightError(
            f"{files.path / INDEX_NAME} lists {len(missing)} tensors that no shard holds, e.g. "
            f"{missing[0]!r}; the shards and the index are from different downloads"
        )
