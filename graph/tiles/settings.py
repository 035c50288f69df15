"""Settings of the compiler: Inductor's options and the range of T. Needs no torch.

Both are part of the bundle key, which is computed without compiling anything.
"""

from __future__ import annotations

from typing import Any

from girih.kernels.base.target import Target

MAX_STEP_TOKENS = 1 << 16
"""Upper bound of T and S in compiled code. A constant of the project, not a runtime option: the
token budget of a step may change without a recompile."""

# Vector width in bits that Inductor generates for each instruction set.
_SIMD_BITS = {"generic": 0, "avx2": 256, "avx512": 512, "avx512_bf16": 512, "amx_bf16": 512}
_MARCH = {
    "generic": "x86-64",
    "avx2": "x86-64-v3",
    "avx512": "x86-64-v4",
    "avx512_bf16": "cooperlake",  # x86-64-v4 with AVX512-BF16
    "amx_bf16": "cooperlake",  # only our kernels use tiles
}


def inductor_options(target: Target) -> dict[str, Any]:
    """Return Inductor's options for a target; part of the compile key as a whole."""
    return {
        "cpp.dynamic_threads": True,
        "cpp.simdlen": _SIMD_BITS[target.isa],
        "cpp.march": _MARCH[target.isa],  # not "native": the bundle runs on any machine of the ISA
        # Round where the model rounds: fused bfloat16 code otherwise keeps float32 in between,
        # which is no less accurate but up to 3.7 % away from what transformers computes.
        "emulate_precision_casts": not target.fast_math,
        "cpp.enable_floating_point_contract_flag": "fast" if target.fast_math else "off",
        "cpp.enable_unsafe_math_opt_flag": target.fast_math,
        "cpp.vec_isa_ok": True,  # the target says so; the probe would compile a file to find out
        # The wrapper only calls kernels. O1 takes g++ 1.9 s longer and saves 3 of 20 µs per tile.
        "aot_inductor.compile_wrapper_opt_level": "Og",
        "aot_inductor.enable_line_tables": False,
        # Measured here: precompiling costs 22 s of CPU and saves 2 s per tile; and tiles would wait
        # for one another's header.
        "aot_inductor.precompile_headers": False,
        "size_asserts": False,
        "alignment_asserts": False,
    }
