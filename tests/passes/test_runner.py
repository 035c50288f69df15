"""The runner: switches, honesty, dumps, and that levels and pipeline agree with the registry."""

import dataclasses

import pytest
import torch
from support_models import tiny_traced

from girih.conf.compose import compose_config, to_engine_config
from girih.graph.partition.graph_file import read_graph
from girih.kernels.base.errors import ConfigError, PassError
from girih.kernels.base.target import Target, detect_isa
from girih.passes import pipeline as pipeline_module
from girih.passes import runner
from girih.passes.options import OptConfig, PassesConfig
from girih.passes.pass_api import PASSES, Pass, insert_call
from girih.passes.pipeline import FACTS, PIPELINE, Phase
from girih.passes.runner import lower

TARGET = Target("cpu", detect_isa(), 2, "g++")
ALL = tuple(PIPELINE)


@pytest.fixture
def one_pass(monkeypatch):
    """Run a single function as the pass "canonicalize"."""

    def run(function, expects=lambda graph, target: None, **options):
        fake = Pass("canonicalize", function, expects)
        monkeypatch.setattr(runner, "pipeline", lambda: (fake,))
        opt = OptConfig(**options)
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

    with pytest.raises(PassError, match="pass canonicalize broke the graph"):
        one_pass(breaks)


def test_a_pass_that_records_a_wrong_shape_is_named(one_pass):
    def forgets(graph, ctx):
        silu = next(n for n in graph.nodes if n.target is torch.ops.aten.silu.default)
        node = silu.args[0]  # a linear of 64 inputs and 96 outputs
        with graph.inserting_after(node):
            new = graph.call_function(torch.ops.aten.relu.default, node.args[:1])
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        return 1

    with pytest.raises(PassError, match=r"on relu_default .*says f32\[1, d0, 96\], aten\.relu"):
        one_pass(forgets)


def test_shapes_that_follow_from_a_change_are_checked_too(one_pass):
    def forgets(graph, ctx):
        node = next(n for n in graph.nodes if n.target is torch.ops.aten.silu.default)
        half = insert_call(graph, node, torch.ops.aten.slice.Tensor, (node.args[0], -1, 0, 8), node)
        node.update_arg(0, half)
        node.meta["val"] = half.meta["val"]  # its reader still has the old width
        return 1

    with pytest.raises(PassError, match=r"pass canonicalize left a wrong shape|must match"):
        one_pass(forgets)


@pytest.mark.parametrize("strict", [False, True])
def test_a_pass_that_finds_nothing_where_it_ought_to(one_pass, strict):
    def declines(graph, ctx):
        ctx.refuse(next(iter(graph.nodes)), "no reason")
        return 0

    def run():
        return one_pass(declines, lambda graph, target: "it should", strict=strict)

    if strict:
        with pytest.raises(PassError, match=r"nothing although it should\n  refused .*reason"):
            run()
    else:
        assert "FOUND NOTHING although it should; refused" in run().report()


def test_the_runner_stops_after_the_named_pass(lowered_by):
    lowered, counts = lowered_by(tiny_traced("llama"), *ALL, stop_after="gather_last_rows")
    assert [name for name, count in counts.items() if count] == ["canonicalize", "gather_last_rows"]
    again, _ = lowered_by(tiny_traced("llama"), "canonicalize", "gather_last_rows")
    assert lowered.key == again.key


def test_an_unknown_last_pass_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'pack_linears'"):
        OptConfig(stop_after="pack_linear")


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
        "000_traced.json",
        "000_traced.txt",
        "001_canonicalize.diff",
        "001_canonicalize.json",
        "001_canonicalize.txt",
        "report.txt",
    ]
    assert (tmp_path / "d" / "000_traced.txt").read_text() == tiny_traced("gpt2").as_text()
    assert (tmp_path / "d" / "001_canonicalize.txt").read_text() == lowered.as_text()
    assert (tmp_path / "d" / "report.txt").read_text() == lowered.report()


def test_the_difference_holds_what_changed_and_nothing_else(lowered_by, tmp_path):
    lowered_by(tiny_traced("llama"), *ALL, dump=str(tmp_path))
    lines = (tmp_path / "003_merge_sibling_linears.diff").read_text().splitlines()
    removed = [line for line in lines if line.startswith("-%")]
    # Per layer: five weights, five linears, and what reads the strided parts.
    assert sum("aten.linear" in line for line in removed) == 2 * 5
    assert sum(" = input" in line for line in removed) == 2 * 5
    assert not any("rotary_emb" in line for line in removed)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_a_dump_can_be_replayed(lowered_by, tmp_path, kind):
    here = {"isa": detect_isa()}
    lowered, _ = lowered_by(tiny_traced(kind, dtype="bfloat16"), *ALL, dump=str(tmp_path), **here)
    for name, rest in (("000_traced", ALL), ("001_canonicalize", ALL[1:])):
        again, _ = lowered_by(read_graph(tmp_path / f"{name}.json"), *rest, verify=True, **here)
        assert again.key == lowered.key
        assert [e.sources for e in again.weights.entries.values()] == [
            e.sources for e in lowered.weights.entries.values()
        ]
        assert "merge_sibling_linears" in again.as_text() or kind == "gpt2"


def test_a_directory_that_cannot_be_written_is_named(lowered_by, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"opt\.dump is .*cannot be written"):
        lowered_by(tiny_traced("llama"), dump=str(tmp_path / "file" / "d"))


def test_registry_pipeline_and_switches_name_the_same_passes():
    fields = tuple(f.name for f in dataclasses.fields(PassesConfig))
    assert fields == PIPELINE
    assert [p.name for p in pipeline_module.pipeline()] == list(PIPELINE)
    assert set(PASSES) == set(PIPELINE)


def test_phases_stand_in_order():
    order = list(Phase)
    phases = [order.index(facts.phase) for facts in FACTS]
    assert phases == sorted(phases)


def test_every_pass_shows_what_it_rewrites_and_what_it_refuses():
    for facts, item in zip(FACTS, pipeline_module.pipeline(), strict=True):
        text = item.run.__doc__
        assert text.splitlines()[0] == facts.summary
        assert "->" in text, item.name
        assert "Refuses" in text, item.name
        assert facts.summary.endswith("."), item.name


def enabled(level):
    opt = to_engine_config(compose_config("compile", [f"opt={level}"])).opt
    switches = dataclasses.asdict(opt.passes)
    return {name for name, options in switches.items() if options["enabled"]}


def test_levels_only_add_passes():
    assert enabled("O0") < enabled("O2")
    assert enabled("O2") == set(PIPELINE)
