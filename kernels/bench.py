"""Speed of the CPU kernels against what the machine can do: `python -m girih.kernels.bench`.

Every figure is the median of repeats over a fixed time. Weights rotate through copies larger than
the last-level cache, as the layers of a model do.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from girih.kernels.base.target import detect_isa
from girih.kernels.build import library
from girih.kernels.kv.layout import kv_cache_shapes
from girih.kernels.ops.packing import packed_shape

LINEARS = (
    ("qkv", 960, 576),
    ("out", 576, 576),
    ("gate_up", 3072, 576),
    ("down", 576, 1536),
    ("8B out", 4096, 4096),
)
HEAD = ("head", 49152, 576)
ROTATED_BYTES = 192 * 1024 * 1024  # far beyond the L2 of all cores
BEST = False


@dataclass(frozen=True)
class Peaks:
    """The machine's peaks: operations of products and bytes read, per second."""

    gflops: float
    gbytes: float


def measure_peaks(path: Path, dtype: torch.dtype) -> Peaks:
    """Measure both peaks with all threads, best of several runs of the loaded library's loops.

    Args:
        path: the library.
        dtype: of the products; those of bfloat16 may run on units of their own.
    """
    lib = ctypes.CDLL(str(path))
    lib.girih_peak_fma.restype = lib.girih_peak_amx.restype = ctypes.c_double
    data = torch.ones(32 * 1024 * 1024)
    part = data.numel() // 16
    gflops, gbytes = 0.0, 0.0
    for turn in range(160):
        for multiply in (lib.girih_peak_fma, lib.girih_peak_amx)[: 1 + (dtype == torch.bfloat16)]:
            begin = clock()
            operations = multiply(ctypes.c_long(50_000))
            gflops = max(gflops, operations / (clock() - begin) / 1e9)
        start = data.data_ptr() + 4 * part * (turn % 16)
        begin = clock()
        lib.girih_peak_read(ctypes.c_void_p(start), ctypes.c_long(part))
        gbytes = max(gbytes, part * 4 / (clock() - begin) / 1e9)
    return Peaks(gflops, gbytes)


def clock() -> float:
    """Seconds of this thread where it does all the work, so that a busy machine does not count."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def typical_seconds(call: Callable[[], object], budget: float) -> float:
    """Return the median duration of `call`, repeated for `budget` seconds (at least 5 times).

    `BEST` takes the fastest instead: the figure to use on a machine that others use too, and
    best with one thread, whose own time counts then.
    """
    call()
    samples: list[float] = []
    stop = time.perf_counter() + budget
    while len(samples) < 5 or time.perf_counter() < stop:
        begin = clock()
        call()
        samples.append(clock() - begin)
    return min(samples) if BEST else statistics.median(samples)


def bench_linear(
    name: str, n: int, k: int, tokens: int, dtype: torch.dtype, peaks: Peaks, budget: float
) -> str:
    """Return a line on one packed linear at one number of tokens."""
    shape = packed_shape(n, k, dtype, detect_isa())
    weight_bytes = n * k * dtype.itemsize
    copies = max(2, ROTATED_BYTES // weight_bytes)
    weights = [torch.zeros(shape, dtype=dtype)]
    torch.ops.girih.pack_linear_(weights[0], torch.randn(n, k).to(dtype), 0)
    weights += [weights[0].clone() for _ in range(copies - 1)]
    x = torch.randn(tokens, k).to(dtype)
    turn = 0

    def call() -> None:
        nonlocal turn
        turn = (turn + 1) % copies
        torch.ops.girih.packed_linear(x, weights[turn], None, n)

    seconds = typical_seconds(call, budget)
    gflops, gbytes = 2 * tokens * n * k / seconds / 1e9, weight_bytes / seconds / 1e9
    return (
        f"{name:8s} T={tokens:<5d} {seconds * 1e6:9.1f} us  {gbytes:6.1f} GB/s "
        f"({100 * gbytes / peaks.gbytes:3.0f} %)  {gflops:7.1f} GFLOP/s "
        f"({100 * gflops / peaks.gflops:3.0f} %)"
    )


def random_cache(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A cache that is read without surprises; 60 in every byte of int8 makes a scale of 0.011."""
    if dtype == torch.int8:
        return torch.full(shape, 60, dtype=dtype)
    return torch.randn(shape).to(dtype)


def bench_attention(
    case: tuple[int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    peaks: Peaks,
    budget: float,
) -> str:
    """Return a line on attention with 9 heads, 3 kv heads of 64 (32 slots per block).

    Args:
        case: requests, new tokens of each, their context.
        dtype: of queries, keys and values.
        kv_dtype: of the KV cache.
        peaks: of the machine.
        budget: seconds to spend.
    """
    requests, queries, context = case
    heads, kv_heads, dim, size = 9, 3, 64, 32
    blocks = -(-context // size)
    layers = 8
    shapes = kv_cache_shapes(requests * blocks + 1, size, kv_heads, dim, dim, kv_dtype)
    caches = [[random_cache(shape, kv_dtype) for shape in shapes] for _ in range(layers)]
    table = torch.arange(1, requests * blocks + 1, dtype=torch.int32).view(requests, blocks)
    positions = torch.arange(context - queries, context)
    slots = (table.long()[:, positions // size] * size + positions % size).flatten()
    tokens = requests * queries
    q, k = torch.randn(tokens, heads, dim).to(dtype), torch.randn(tokens, kv_heads, dim).to(dtype)
    v, out = torch.randn(tokens, kv_heads, dim).to(dtype), torch.empty_like(q)
    starts = torch.arange(requests + 1, dtype=torch.int32) * queries
    lengths = torch.full((requests,), context, dtype=torch.int32)
    turn = 0

    def call() -> None:
        nonlocal turn
        turn = (turn + 1) % layers
        caches_now = caches[turn]
        torch.ops.girih.paged_attention(
            *(q, k, v, *caches_now, starts, lengths, table, slots),
            *(dim**-0.5, True, 0, 0.0, None, out),
        )

    seconds = typical_seconds(call, budget)
    pairs = sum(context - queries + i + 1 for i in range(queries))
    gflops = 4 * requests * heads * dim * pairs / seconds / 1e9
    read = 2 * requests * context * kv_heads * dim * kv_dtype.itemsize
    gbytes = read / seconds / 1e9
    return (
        f"attn {requests:3d} x {queries:<5d}of {context:<5d} {seconds * 1e6:9.1f} us  "
        f"{gbytes:6.1f} GB/s ({100 * gbytes / peaks.gbytes:3.0f} %)  {gflops:7.1f} GFLOP/s "
        f"({100 * gflops / peaks.gflops:3.0f} %)"
    )


def main() -> None:
    """Build the library when none is named, then print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, help="a built library (default: build one)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per case")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--kv-dtype", choices=("int8",), help="of the KV cache (default: --dtype)")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 32, 128, 512, 1024])
    parser.add_argument("--threads", type=int, default=0, help="0 takes torch's default")
    parser.add_argument("--best", action="store_true", help="fastest repeat, not the median")
    parser.add_argument("--only", choices=("linear", "attention"))
    options = parser.parse_args()
    global BEST
    BEST = options.best
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        path = options.library
        if path is None:
            begin = time.perf_counter()
            path = library.build_library(detect_isa(), Path(scratch) / "kernels.so")
            print(f"built in {time.perf_counter() - begin:.1f} s")
        library.load_library(path)
        dtype = getattr(torch, options.dtype)
        kv_dtype = getattr(torch, options.kv_dtype or options.dtype)
        peaks = measure_peaks(path, dtype)
        print(
            f"{torch.get_num_threads()} threads, {detect_isa()}, {options.dtype}: "
            f"peak {peaks.gflops:.0f} GFLOP/s, reads {peaks.gbytes:.1f} GB/s"
        )
        if options.only != "attention":
            for tokens in options.tokens:
                for name, n, k in LINEARS:
                    print(bench_linear(name, n, k, tokens, dtype, peaks, options.seconds))
            print(bench_linear(*HEAD, 1, dtype, peaks, options.seconds))
            print(bench_linear(*HEAD, 8, dtype, peaks, options.seconds))
        if options.only != "linear":
            for case in ((1, 1, 512), (1, 1, 4096), (8, 1, 1024), (32, 1, 512), (1, 1024, 1024)):
                print(bench_attention(case, dtype, kv_dtype, peaks, options.seconds))


if __name__ == "__main__":
    main()
