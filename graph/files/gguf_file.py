"""One GGUF file: metadata, and tensors dequantised one at a time under Hugging Face names.

Owns the file format. Must not know configs, tokenizers or caches (`gguf_convert` does).

    | magic, version, counts | metadata pairs | tensor table | padding | tensor bytes |

Quantised tensors are dequantised a few rows at a time straight into the wanted dtype, so reading a
262144 x 640 embedding never holds its float32 copy.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from girih.graph.files.gguf_names import family_of, has_norm_offset, hf_name, rotary_heads
from girih.kernels.base.errors import WeightError

if TYPE_CHECKING:
    import numpy as np
    import torch

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
ROPE_FREQS = "rope_freqs.weight"
"""Rotary factors: the one tensor that is part of the config."""
_STRING, _ARRAY = 8, 9
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CHUNK_VALUES = 1 << 22  # values dequantised at once: 16 MiB of float32
_MAX_KEPT_ARRAY = 4096  # longer arrays are vocabularies; the tokenizer converter reads those
_MAX_NESTING = 4  # arrays within arrays; files in use have none


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table.

    Attributes:
        shape: dimensions, outermost first (the file lists them the other way round).
        kind: GGML type name, e.g. "F32" or "Q4_1".
        offset: first byte, counted from the start of the file.
        num_bytes: length in bytes.
    """

    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Everything in front of the tensor bytes.

    Attributes:
        metadata: key → value; arrays longer than 4096 entries are left out.
        tensors: GGUF name → table row.
        digest: SHA-256 of the header's bytes and of the rotary factors, which together hold the
            whole config and tokenizer.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    digest: str

    def model_dtype(self) -> str:
        """Precision to compute in: the one most bytes have, bfloat16 if those are quantised."""
        num_bytes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            num_bytes[_PLAIN.get(tensor.kind, "bfloat16")] += tensor.num_bytes
        return num_bytes.most_common(1)[0][0] if num_bytes else "bfloat16"


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.pos = 0

    def unpack(self, layout: str) -> Any:
        values = struct.unpack_from("<" + layout, self.data, self.pos)
        self.pos += struct.calcsize("<" + layout)
        return values[0] if len(values) == 1 else values

    def string(self) -> str:
        length = self.unpack("Q")
        raw = self.data[self.pos : self.pos + length]
        if len(raw) < length:
            raise struct.error(f"a string of {length} bytes runs past the end")
        self.pos += length
        return raw.decode("utf-8", "replace")

    def pair(self) -> tuple[str, Any]:
        key = self.string()
        try:
            return key, self.value(self.unpack("I"))
        except struct.error as exc:
            raise struct.error(f"{key}: {exc}") from exc

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise struct.error(f"unknown metadata type {kind}")
        if depth == _MAX_NESTING:
            raise struct.error(f"arrays within arrays, more than {_MAX_NESTING} deep")
        item, count = self.unpack("IQ")
        if item in _SCALARS:
            if count > _MAX_KEPT_ARRAY:
                self.pos += count * struct.calcsize("<" + _SCALARS[item])
                return None
            return list(struct.unpack(f"<{count}{_SCALARS[item]}", self._bytes(item, count)))
        values = [self.value(item, depth + 1) for _ in range(count)]
        return values if count <= _MAX_KEPT_ARRAY else None

    def _bytes(self, item: int, count: int) -> bytes:
        length = count * struct.calcsize("<" + _SCALARS[item])
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        return raw


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse and check a file's header.

    Raises:
        WeightError: not a GGUF file, an unknown version, or shorter than its header promises.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse_header(path, data)
    except (struct.error, OverflowError, MemoryError) as exc:
        raise _damaged(path, f"its header ends early or is garbled ({exc})") from exc
    except (OSError, ValueError) as exc:  # ValueError: mmap of an empty file
        raise WeightError(f"cannot read the GGUF file {path}: {exc}") from exc


def _parse_header(path: Path, data: mmap.mmap) -> GgufHeader:
    if data[:4] != b"GGUF":
        raise WeightError(
            f"{path} is not a GGUF file: it starts with {data[:4]!r} instead of b'GGUF'"
        )
    cursor = _Cursor(data)
    cursor.pos = 4
    version, num_tensors, num_pairs = cursor.unpack("IQQ")
    if version not in (2, 3):
        raise WeightError(
            f"{path} is GGUF version {version}; girih reads little-endian versions 2 and 3"
        )
    metadata = {}
    for _ in range(num_pairs):
        key, value = cursor.pair()
        if value is not None:
            metadata[key] = value
    rows = [_read_row(cursor) for _ in range(num_tensors)]
    alignment = _alignment(path, metadata)
    base = -(-cursor.pos // alignment) * alignment
    tensors = {name: _place(path, name, row, base) for name, *row in rows}
    _check_extent(path, tensors, len(data))
    digest = hashlib.sha256(data[: cursor.pos])
    factors = tensors.get(ROPE_FREQS)
    if factors is not None:
        digest.update(data[factors.offset : factors.offset + factors.num_bytes])
    return GgufHeader(metadata, tensors, digest.hexdigest())


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    """Bytes whose multiples tensors start at."""
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or value < 1 or value & (value - 1):
        raise _damaged(path, f"general.alignment is {value!r}; it must be a power of two")
    return value


def _read_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dims = cursor.unpack("I")
    if num_dims > 8:
        raise struct.error(f"tensor {name!r} has {num_dims} dimensions")
    dims = tuple(cursor.unpack("Q") for _ in range(num_dims))
    kind, offset = cursor.unpack("IQ")
    return name, tuple(reversed(dims)), kind, offset


def _place(path: Path, name: str, row: list[Any], base: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    shape, kind, offset = row
    try:
        quant = GGMLQuantizationType(kind)
    except ValueError as exc:
        raise WeightError(f"{path}: tensor {name!r} has the unknown GGML type {kind}") from exc
    block_values, block_bytes = GGML_QUANT_SIZES[quant]
    if shape and shape[-1] % block_values:
        raise _damaged(path, f"rows of {name!r} are no multiple of {block_values} values")
    num_bytes = math.prod(shape) // block_values * block_bytes
    return GgufTensor(shape, quant.name, base + offset, num_bytes)


def _check_extent(path: Path, tensors: dict[str, GgufTensor], file_bytes: int) -> None:
    for name, tensor in tensors.items():
        end = tensor.offset + tensor.num_bytes
        if end > file_bytes:
            raise _damaged(
                path, f"tensor {name!r} ends at byte {end}, but the file has only {file_bytes}"
            )


def _damaged(path: Path, what: str) -> WeightError:
    return WeightError(f"{path} is damaged: {what}; download or copy the file again")


class GgufFile:
    """An open GGUF file whose tensors go by their Hugging Face names.

    Reading is positional, so threads may share one instance.

    Raises:
        SourceError: the architecture is not supported.
        WeightError: the file is damaged, or holds a tensor its architecture does not have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_gguf_header(path)
        self._family = family_of(self.header.metadata, str(path))
        self._gguf_names: dict[str, str] = {}
        for name in self.header.tensors:
            target = hf_name(self._family, name)
            if target is not None:
                self._gguf_names[target] = name
            elif name != ROPE_FREQS:  # those are in the config (see `gguf_convert`)
                raise WeightError(
                    f"{path} holds the tensor {name!r}, which girih cannot place in a "
                    f"{self.header.metadata['general.architecture']} model"
                )
        self._fd = os.open(path, os.O_RDONLY)

    def names(self) -> list[str]:
        """Hugging Face tensor names, in file order."""
        return list(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost dimension first."""
        return self.header.tensors[self._gguf_names[name]].shape

    def dtype(self, name: str) -> str:
        """Stored type: "float32", "float16", "bfloat16", or a GGML block type such as "Q4_1"."""
        kind = self.header.tensors[self._gguf_names[name]].kind
        return _PLAIN.get(kind, kind)

    def read(self, name: str, dtype: str | None) -> torch.Tensor:
        """Dequantise one tensor; None keeps a plain dtype and turns a quantised one to float32."""
        import torch

        gguf_name = self._gguf_names[name]
        stored = self.header.tensors[gguf_name]
        target = getattr(torch, dtype or _PLAIN.get(stored.kind, "float32"))
        if has_norm_offset(self._family, gguf_name):
            # The offset has to come off before rounding: 1 + w keeps fewer bits of w.
            return (self._dequantise(gguf_name, stored, torch.float32) - 1).to(target)
        tensor = self._dequantise(gguf_name, stored, target)
        num_heads = rotary_heads(self._family, self.header.metadata, gguf_name)
        if num_heads is None:
            return tensor
        pairs = tensor.reshape(num_heads, stored.shape[0] // num_heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(stored.shape)

    def read_factors(self, gguf_name: str) -> list[float]:
        """A small tensor that has no Hugging Face name, flat."""
        import torch

        stored = self.header.tensors[gguf_name]
        values: list[float] = self._dequantise(gguf_name, stored, torch.float32).flatten().tolist()
        return values

    def close(self) -> None:
        """Close the file; reading afterwards is an error. Closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _dequantise(self, name: str, stored: GgufTensor, target: torch.dtype) -> torch.Tensor:
        import torch
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        quant = GGMLQuantizationType[stored.kind]
        row_values = stored.shape[-1] if stored.shape else 1
        num_rows = math.prod(stored.shape) // max(row_values, 1)
        result = torch.empty(num_rows, row_values, dtype=target)
        step = max(1, _CHUNK_VALUES // max(row_values, 1))
        row_bytes = stored.num_bytes // max(num_rows, 1)
        for begin in range(0, num_rows, step):
            count = min(step, num_rows - begin)
            raw = self._read_rows(name, stored.offset + begin * row_bytes, count, row_bytes)
            result[begin : begin + count] = torch.from_numpy(_plain_values(raw, quant, dequantize))
        return result.reshape(stored.shape)

    def _read_rows(self, name: str, offset: int, count: int, row_bytes: int) -> np.ndarray:
        import numpy as np

        raw = np.empty((count, row_bytes), dtype=np.uint8)
        buffer = raw.reshape(-1).data
        done = 0
        while done < len(buffer):
            got = os.preadv(self._fd, [buffer[done:]], offset + done)
            if got == 0:
                raise _damaged(self.path, f"it ends inside tensor {name!r}")
            done += got
        return raw


def _plain_values(raw: np.ndarray, quant: Any, dequantize: Any) -> np.ndarray:
    import numpy as np

    if quant.name == "F32":
        return raw.view(np.float32)
    if quant.name == "F16":
        return raw.view(np.float16)
    try:
        values: np.ndarray = dequantize(raw, quant)
    except NotImplementedError as exc:
        raise WeightError(
            f"GGML type {quant.name} cannot be dequantised; use another file"
        ) from exc
    return values
