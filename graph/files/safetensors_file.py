"""One safetensors file: header parsed and checked, tensor bytes read on demand.

Owns the file format; knows no torch and no model. Layout on disk:

    | u64 header length | JSON header | tensor bytes, at offsets relative to the header's end |

Bytes are read into the caller's buffer rather than mapped: a mapped file stays in the process's
resident set until the pages are dropped, a read one never enters it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.kernels.base.errors import WeightError

MAX_HEADER_BYTES = 100_000_000

# dtype code → (name, bytes per element)
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
        shape: dimensions, outermost first.
        dtype: element type by torch's name, e.g. "bfloat16".
        offset: first byte, counted from the start of the file.
        num_bytes: length in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


def _damaged(path: Path, what: str) -> WeightError:
    return WeightError(f"{path} is damaged: {what}; download or copy the file again")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the file by name, without touching the tensor bytes.

    Raises:
        WeightError: the file is missing, truncated, or its header is not safetensors.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > MAX_HEADER_BYTES or 8 + length > file_bytes:
                raise _damaged(
                    path, f"its header claims {length} bytes, but the file has only {file_bytes}"
                )
            raw = file.read(length)
    except OSError as exc:
        raise WeightError(f"cannot read the weights at {path}: {exc.strerror or exc}") from exc
    try:
        entries = json.loads(raw)
        if not isinstance(entries, dict):
            raise ValueError(f"it holds a {type(entries).__name__} instead of an object")
        entries.pop("__metadata__", None)
        tensors = {name: _parse_entry(name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise _damaged(path, f"its header is not a safetensors header ({exc!r})") from exc
    _check_extent(path, tensors, 8 + length, file_bytes)
    return tensors


def _parse_entry(name: str, entry: dict[str, Any], base: int) -> StoredTensor:
    begin, end = _sizes(name, entry, "data_offsets")
    code = entry["dtype"]
    dtype, item_bytes = DTYPES[code]
    shape = _sizes(name, entry, "shape")
    num_bytes = end - begin
    if num_bytes != math.prod(shape) * item_bytes:
        raise ValueError(f"{name}: {code} {list(shape)} cannot take bytes {begin} to {end}")
    return StoredTensor(shape, dtype, base + begin, num_bytes)


def _sizes(name: str, entry: dict[str, Any], key: str) -> tuple[int, ...]:
    values = entry[key]
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise ValueError(f"{name}: {key} is {values!r}; it must be a list of whole numbers from 0")
    return tuple(values)


def _check_extent(path: Path, tensors: dict[str, StoredTensor], base: int, file_bytes: int) -> None:
    needed = max((t.offset + t.num_bytes for t in tensors.values()), default=base)
    if needed > file_bytes:
        last = max(tensors, key=lambda name: tensors[name].offset + tensors[name].num_bytes)
        raise _damaged(
            path,
            f"its header promises {needed} bytes (last tensor {last!r}), the file has {file_bytes}",
        )


def write_safetensors(
    path: Path, layout: dict[str, tuple[str, tuple[int, ...]]], read: Callable[[str], memoryview]
) -> None:
    """Write a file one tensor at a time, and wait until it is on disk.

    Args:
        path: file to create.
        layout: name → (dtype by torch's name, shape), in file order.
        read: called once per name, returns the tensor's bytes.
    """
    codes = {name: (code, item_bytes) for code, (name, item_bytes) in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in layout.items():
        code, item_bytes = codes[dtype]
        end = offset + math.prod(shape) * item_bytes
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in layout:
            file.write(read(name))
        file.flush()
        os.fsync(file.fileno())


class SafetensorsFile:
    """An open safetensors file. Reading is positional, so threads may share one instance."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = read_header(path)
        self._fd = os.open(path, os.O_RDONLY)

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Fill `buffer` (as many bytes as the tensor has) with the tensor's bytes.

        Raises:
            WeightError: the file ended early (it changed since it was opened).
        """
        stored = self.tensors[name]
        done = 0
        while done < stored.num_bytes:
            count = os.preadv(self._fd, [buffer[done:]], stored.offset + done)
            if count == 0:
                raise _damaged(self.path, f"it ends inside tensor {name!r}")
            done += count

    def close(self) -> None:
        """Close the file; reading afterwards is an error. Closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
