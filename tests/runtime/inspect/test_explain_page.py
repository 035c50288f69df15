"""The page of `girih explain`, and the costs of tiles that it shows."""

import dataclasses
import math
import re
import time

import pytest
import torch
from support_models import program_of, tiny_model, tiny_traced

from girih.conf.compose import compose_config, to_engine_config
from girih.graph.bundle.bundle import BundleOrigin
from girih.graph.tiles.inductor import eager_tile
from girih.kernels.base.errors import ConfigError
from girih.kernels.bench import Peaks
from girih.passes.options import PASS_NAMES
from girih.runtime.inspect import compiler_tools
from girih.runtime.inspect.machine_load import OtherWork
from girih.runtime.inspect.tile_stats import is_enough, tile_cost
from girih.runtime.records.config import TargetConfig
from girih.runtime.start import launch, runnable_program
from girih.runtime.start.context import start_of, target_of
from girih.runtime.start.wanted import model_spec


@pytest.fixture
def config(monkeypatch, tmp_path):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path / "cache"))
    return to_engine_config(compose_config("explain", [f"model={tiny_model('llama')}"]))


def test_the_page_holds_everything_and_needs_nothing(config, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler_tools, "trace", lambda spec, progress: tiny_traced("llama"))
    path = tmp_path / "page.html"
    compiler_tools.write_page(config, path)
    page = path.read_text()
    for name in PASS_NAMES:
        assert f"<td>{name}</td>" in page
        assert f"<summary>{name}: before and after</summary>" in page
    assert 'class="add">+%' in page
    assert 'class="del">-%' in page
    assert "rows verified: 3 tiles, " in page
    keys = set(re.findall(r"tile ([0-9a-f]{16})", page))
    assert len(keys) == 3
    assert page.count('class="a" title="attention') == 2
    assert "run <code>girih compile</code> first" in page
    assert not re.search(r"(src|href)=|https?:|@import|url\(", page)
    assert page.count("<details") == page.count("</details>") == len(PASS_NAMES) + 2


def test_explain_and_a_start_say_what_the_tiles_showed(config, monkeypatch):
    monkeypatch.setattr(launch, "trace", lambda spec, progress: tiny_traced("llama"))
    assert "rows verified: 3 tiles, " in launch.explain(config)
    monkeypatch.setattr(runnable_program, "trace", lambda spec, progress: tiny_traced("llama"))
    eager = to_engine_config(compose_config("explain", [f"model={tiny_model('llama')}", "opt=O0"]))
    start = start_of(eager)
    report = launch.engine_of(start, runnable_program.obtain_program(start)).report
    assert "rows verified: 3 tiles, " in report.as_text()
    assert report.bundle == BundleOrigin("none", "O0 runs eager pieces")
    assert report.as_text().startswith("bundle none: O0 runs eager pieces\nspec 0.")
    assert list(report.seconds) == ["spec", "trace", "lower", "weights", "bind"]


def test_a_file_that_cannot_be_written_is_named(config, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler_tools, "trace", lambda spec, progress: tiny_traced("llama"))
    with pytest.raises(ConfigError, match=r"explain\.html is .*cannot be written: .*directory"):
        compiler_tools.write_page(config, tmp_path)


def test_times_and_their_circumstances_are_on_the_page(config, tmp_path, monkeypatch):
    """The bundle is stood in for: tiles that do nothing, and a machine that others use."""
    monkeypatch.setattr(compiler_tools, "trace", lambda spec, progress: tiny_traced("llama"))
    monkeypatch.setattr(compiler_tools, "read_key", lambda path: compiler_tools.bundle_key(*asked))
    monkeypatch.setattr(compiler_tools, "open_bundle", lambda path: FakeBundle())
    monkeypatch.setattr(compiler_tools, "load_library", lambda path: None)
    counts = []

    def load_tile(key):
        counts.append(torch.get_num_threads())
        return lambda inputs: None

    monkeypatch.setattr(compiler_tools, "load_tile", load_tile)
    monkeypatch.setattr(compiler_tools, "measure_peaks", lambda path, dtype: Peaks(100.0, 10.0))
    monkeypatch.setattr(OtherWork, "average", lambda self: 999.0)
    before = torch.get_num_threads()
    chosen = dataclasses.replace(config, target=TargetConfig(threads=1))
    asked = model_spec(chosen.model), chosen.opt, target_of(chosen)
    try:
        compiler_tools.write_page(chosen, tmp_path / "page.html")
    finally:
        torch.set_num_threads(before)
    page = (tmp_path / "page.html").read_text()
    assert set(counts) == {1}
    assert "with the engine's 1 thread; so are the limits: 100 GFLOP/s" in page
    assert "other processes kept 999.0 of" in page
    assert page.count('class="bar"') == 2 * 3


class FakeBundle:
    library = None

    def package(self, key):
        return key


@pytest.mark.parametrize(
    ("samples", "seconds", "others", "enough"),
    [
        ([], 9.0, 0.0, False),
        ([1.0] * 5, 0.2, 0.0, False),
        ([1.0, 1.02, 1.04, 1.01, 1.01], 0.4, 0.0, True),
        ([1.0, 1.02, 1.04, 1.01, 1.01], 0.4, 999.0, False),
        ([1.0, 9.0, 9.0, 9.0, 9.0, 9.0], 0.4, 0.0, False),
        ([9.0, 9.0, 9.0, 1.0], 1.9, 0.0, False),
        ([9.0, 9.0, 9.0, 1.0], 2.0, 999.0, True),
    ],
)
def test_a_tile_is_called_until_calls_agree_on_a_quiet_machine(
    samples, seconds, others, enough, monkeypatch
):
    monkeypatch.setattr(OtherWork, "average", lambda self: others)
    assert is_enough(samples, seconds, OtherWork()) is enough


def test_costs_of_a_middle_tile():
    """o_proj, gate+up, down, qkv of a layer with 64 units, 96 in the MLP, 128 rows of qkv."""
    tiles = list(program_of(tiny_traced("llama")).tiles.values())
    products = 64 * 64 + 64 * 192 + 96 * 64 + 64 * 128
    for tokens in (1, 256):
        cost = tile_cost(tiles[1].graph, tokens, None)
        assert cost.flops == 2 * products * tokens
        assert cost.seconds is None
        assert cost.share_of(1e9, 1e9) is None
    one, many = (tile_cost(tiles[1].graph, t, None).num_bytes for t in (1, 2))
    weights = 4 * (products + 2 * 64)
    assert one - (many - one) == weights


def test_of_a_table_only_the_rows_looked_up_count():
    first = next(iter(program_of(tiny_traced("llama")).tiles.values()))
    cost = tile_cost(first.graph, 1, None)
    table = 424 * 64 * 4
    qkv = 64 * 128 * 4
    assert qkv < cost.num_bytes < table


def test_a_tile_slower_than_the_time_for_measuring_has_a_time():
    tile = list(program_of(tiny_traced("llama")).tiles.values())[1]
    eager = eager_tile(tile.graph)

    def slow(inputs):
        time.sleep(0.2)
        return eager(inputs)

    assert 0.2 < tile_cost(tile.graph, 1, slow).seconds < math.inf


def test_times_are_measured_when_there_is_code():
    tile = list(program_of(tiny_traced("llama")).tiles.values())[1]
    cost = tile_cost(tile.graph, 1, eager_tile(tile.graph))
    assert cost.seconds > 0
    assert cost.share_of(1e12, 1e15) == pytest.approx(cost.num_bytes / 1e12 / cost.seconds)
