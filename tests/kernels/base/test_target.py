"""Resolving what to compile for."""

import pytest
import torch

from girih.kernels.base import target
from girih.kernels.base.errors import ConfigError

V3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    "flags,isa",
    [
        (set(), "generic"),
        (V3, "avx2"),
        (V3 - {"fma"}, "generic"),
        (V4, "avx512"),
        (V4 - {"avx512vl"}, "avx2"),
        (V4 | {"avx512_bf16"}, "avx512_bf16"),
        (V3 | {"avx512_bf16"}, "avx2"),
        (V4 | {"avx512_bf16", "amx_tile", "amx_bf16"}, "amx_bf16"),
        (V4 | {"amx_tile", "amx_bf16"}, "avx512"),
    ],
)
def test_detection(monkeypatch, flags, isa):
    monkeypatch.setattr(target, "_cpu_flags", lambda: flags)
    assert target.detect_isa() == isa
    assert target.why_not_runnable("generic") is None and target.why_not_runnable(isa) is None
    if isa != "amx_bf16":
        assert repr(isa) in str(target.why_not_runnable("amx_bf16"))


def test_resolved_values(monkeypatch):
    monkeypatch.setenv("CXX", "my-compiler")
    resolved = target.resolve_target()  # not probed
    assert resolved == target.Target(
        "cpu", target.detect_isa(), torch.get_num_threads(), "my-compiler"
    )
    assert target.resolve_target(isa="avx512", threads=3).threads == 3


def test_compiler_name_does_not_need_a_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert target.find_compiler() == "g++"


@pytest.mark.parametrize(
    ("command", "family"),
    [
        ("g++", "g++"),
        ("/usr/bin/g++-13", "g++"),
        ("x86_64-linux-gnu-g++", "g++"),
        ("c++", "g++"),
        ("clang++", "clang++"),
        ("/opt/icpx", "icpx"),
    ],
)
def test_a_bundle_does_not_depend_on_what_the_compiler_is_called(command, family, monkeypatch):
    monkeypatch.setenv("CXX", command)
    assert target.resolve_target().compiler == family


@pytest.mark.parametrize(
    "arguments,message",
    [({"device": "tpu"}, "'tpu'"), ({"isa": "mmx"}, "'mmx'"), ({"threads": -1}, "-1")],
)
def test_bad_values(arguments, message):
    with pytest.raises(ConfigError, match=message):
        target.resolve_target(**arguments)
