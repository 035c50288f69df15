"""The runner: switches, honesty, dumps, and that levels and pipeline agree with the registry."""

import dataclasses

import pytest
import torch
from support_models import tiny_traced

from girih.conf.compose import compose_config, to_engine_config
from girih.kernels.errors import PassError
from girih.kernels.target import Target
from girih.passes import pipeline as pipeline_module
from girih.passes import runner
from girih.passes.options import OptConfig, PassesConfig
from girih.passes.pass_api import PASSES, Pass, Phase
from girih.passes.pipeline import PIPELINE
from girih.passes.runner import lower

TARGET = Target("cpu", "avx2", 2, "g++")
ALL = tuple(PIPELINE)


@pytest.fixture
def one_pass(monkeypatch):
    """Run a single function as the pass "canonicalize"."""

    def run(function):
        fake = Pass("canonicalize", Phase.CANONICALIZE, function, "")
        monkeypatch.setattr(runner, "pipeline", lambda: (fake,))
        opt = OptConfig()
        opt.passes.canonicalize.enabled = True
        return lower(tiny_traced("llama"), opt, TARGET)

    return run


def erase_one(graph):
    graph.eliminate_dead_code()
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.silu.default)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def test_a_pass_that_hides_a_change_is_caught(one_pass):
    def silent(graph, ctx):
        erase_one(graph)
        return 0

    with pytest.raises(PassError, match="canonicalize reported 0 rewrites but the graph changed"):
        one_pass(silent)


def test_a_pass_that_claims_a_change_is_caught(one_pass):
    with pytest.raises(PassError, match="reported 3 rewrites but the graph did not change"):
        one_pass(lambda graph, ctx: 3)


def test_a_pass_that_breaks_the_graph_is_named(one_pass):
    def breaks(graph, ctx):
        output = next(n for n in graph.nodes if n.op == "output")
        other = torch.fx.Graph().placeholder("x")
        output.args = (other,)
        return 1

    with pytest.raises(PassError, match="pass canonicalize failed"):
        one_pass(breaks)


def test_a_pass_that_raises_is_named(one_pass):
    def raises(graph, ctx):
        raise KeyError("lost")

    with pytest.raises(PassError, match="pass canonicalize failed: 'lost'"):
        one_pass(raises)


def test_the_traced_graph_is_untouched(lowered_by):
    traced = tiny_traced("llama")
    text, plan = traced.as_text(), dict(traced.weights.entries)
    lowered, _ = lowered_by(traced, *ALL)
    assert traced.as_text() == text
    assert traced.weights.entries == plan
    assert lowered.key != traced.key


def test_switched_off_passes_do_nothing(lowered_by):
    traced = tiny_traced("llama")
    lowered, counts = lowered_by(traced)
    assert set(counts.values()) == {0}
    assert lowered.key == traced.key
    assert all(not r.enabled for r in lowered.records)
    assert lowered.report().count(" off") == len(PIPELINE)


def test_one_switch_changes_only_its_pass(lowered_by):
    traced = tiny_traced("llama")
    _, everything = lowered_by(traced, *ALL)
    _, counts = lowered_by(traced, *(n for n in ALL if n != "merge_sibling_linears"))
    assert counts["merge_sibling_linears"] == 0
    assert counts["canonicalize"] == everything["canonicalize"]
    assert counts["pack_linears"] > everything["pack_linears"]


def test_new_nodes_carry_the_name_of_their_pass(lowered_by):
    lowered, _ = lowered_by(tiny_traced("llama"), *ALL)
    assert "layers.0.self_attn.{q_proj,k_proj,v_proj}.weight < pack_linears" in lowered.as_text()
    packed = lowered.graph.find_nodes(
        op="call_function", target=torch.ops.girih.packed_linear.default
    )
    assert {n.meta["made_by"] for n in packed} == {"pack_linears"}


def test_report_has_a_line_per_pass_with_refusals(lowered_by):
    lowered, _ = lowered_by(tiny_traced("gpt2"), *ALL)
    lines = lowered.report().splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(PIPELINE)
    assert "refused" in lines[1 + PIPELINE.index("gather_last_rows")]


def test_dump_writes_text_and_difference_of_each_change(lowered_by, tmp_path):
    lowered, _ = lowered_by(
        tiny_traced("gpt2"), "canonicalize", "merge_sibling_linears", dump=str(tmp_path / "d")
    )
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [
        "000_traced.txt",
        "001_canonicalize.diff",
        "001_canonicalize.txt",
    ]
    assert (tmp_path / "d" / "000_traced.txt").read_text() == tiny_traced("gpt2").as_text()
    assert (tmp_path / "d" / "001_canonicalize.txt").read_text() == lowered.as_text()
    assert "\n-%" in (tmp_path / "d" / "001_canonicalize.diff").read_text()


def test_registry_pipeline_and_switches_name_the_same_passes():
    fields = tuple(f.name for f in dataclasses.fields(PassesConfig))
    assert fields == PIPELINE
    assert set(PASSES) == set(PIPELINE)
    assert [p.name for p in pipeline_module.pipeline()] == list(PIPELINE)


def test_phases_stand_in_order():
    order = list(Phase)
    phases = [order.index(p.phase) for p in pipeline_module.pipeline()]
    assert phases == sorted(phases)


def test_every_pass_shows_what_it_rewrites_and_what_it_refuses():
    for item in PASSES.values():
        text = item.run.__doc__
        assert "->" in text, item.name
        assert "Refuses" in text, item.name
        assert item.summary.endswith("."), item.name


def enabled(level):
    opt = to_engine_config(compose_config("compile", [f"opt={level}"])).opt
    switches = dataclasses.asdict(opt.passes)
    return {name for name, options in switches.items() if options["enabled"]}


def test_levels_only_add_passes():
    assert enabled("O0") < enabled("O2")
    assert enabled("O2") == set(PIPELINE)
