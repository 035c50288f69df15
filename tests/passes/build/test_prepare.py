"""Targets of other machines: what is built here, what remains, what is refused."""

import json

import pytest
from support_models import tiny_model

from girih.conf.compose import compose_config, to_engine_config
from girih.graph.bundle.bundle import open_bundle
from girih.graph.bundle.files import read_key
from girih.graph.ir.tile_file import read_tile
from girih.kernels.base import target as targets
from girih.kernels.base.errors import BundleError, ConfigError
from girih.kernels.base.target import Target, require_runnable, resolve_target
from girih.runtime.start import launch


def config(*words):
    words = [f"model={tiny_model('llama')}", *words]
    return to_engine_config(compose_config("compile", words))


def test_a_gpu_that_is_not_here(tmp_path):
    path = tmp_path / "bundle"
    report = launch.compile(config("target=cuda", "target.arch=sm_90", f"bundle={path}"))
    lines = report.splitlines()
    assert lines[0] == f"prepared {path}"
    remains = [line for line in lines if line.startswith("remains: ")]
    assert "compile 3 tiles for sm_90" in remains[0]
    assert "kernel library for sm_90" in remains[1]
    entries = dict(read_key(path).entries)
    assert (entries["target.device"], entries["target.arch"]) == ("cuda", "sm_90")
    prepared = json.loads((path / "prepared.json").read_text())
    assert "FOUND NOTHING" not in prepared["report"]
    tiles = sorted((path / "tiles").glob("*.json"))
    assert len(tiles) == 3
    targets_called = {str(n.target) for t in tiles for n in read_tile(t).nodes}
    assert "aten.linear.default" in targets_called
    with pytest.raises(BundleError, match=r"no readable manifest\.json"):
        open_bundle(path)


def test_a_pass_for_cpus_is_not_missed_on_a_gpu(tmp_path):
    words = ("target=cuda", "target.arch=sm_90", "opt.strict=true", f"bundle={tmp_path / 'b'}")
    assert launch.compile(config(*words)).startswith("prepared ")


def test_a_gpu_must_be_named_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="has no GPU to ask; name one"):
        resolve_target("cuda")
    with pytest.raises(ConfigError, match="'hopper'; it must be 'auto' or like 'sm_90'"):
        resolve_target("cuda", arch="hopper")


def test_what_cannot_run_here_is_refused_before_anything_is_done(monkeypatch):
    with pytest.raises(ConfigError, match=r"runs on 'cpu' only; .girih compile target=cuda"):
        launch.build_engine(config("target=cuda", "target.arch=sm_90"))
    monkeypatch.setattr(targets, "detect_isa", lambda: "avx2")
    with pytest.raises(ConfigError, match=r"'avx512', but this processor supports 'avx2' at most"):
        launch.build_engine(config("target.isa=avx512"))


def test_lesser_code_runs_on_a_bigger_machine(monkeypatch):
    monkeypatch.setattr(targets, "detect_isa", lambda: "avx512_bf16")
    for isa in ("generic", "avx2", "avx512"):
        require_runnable(Target("cpu", isa, 1, "g++"))
