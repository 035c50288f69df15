"""Passes verified: rewrites that change values are caught, and the right node is named."""

import pytest
import torch
from support_models import opt_o2, tiny_traced

from girih.graph.ir.random_values import RandomCheckpoint, random_tensors, relative_rmse
from girih.kernels.base.errors import PassError
from girih.kernels.base.target import Target, detect_isa
from girih.passes import runner
from girih.passes.options import OptConfig
from girih.passes.pass_api import Pass, insert_call
from girih.passes.pipeline import PIPELINE
from girih.passes.runner import lower

TARGET = Target("cpu", detect_isa(), 2, "g++")
aten = torch.ops.aten


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_pipeline_is_verified(kind, dtype):
    opt = opt_o2()
    opt.verify = True
    records = lower(tiny_traced(kind, dtype=dtype), opt, TARGET).records
    assert [r.name for r in records] == list(PIPELINE)
    assert all((r.verified is not None) == (r.rewrites > 0) for r in records)
    # In bfloat16 the rounding of sums depends on the panel's width, and that on the processor.
    verified = [r.verified for r in records if r.verified]
    assert all(v.passed and v.error < (v.bound if dtype == "bfloat16" else 1e-4) for v in verified)


@pytest.fixture
def wrong(monkeypatch):
    """Run a function as the pass "canonicalize" over a tiny Llama, verified."""

    def run(function, dtype="float32"):
        fake = Pass("canonicalize", function, lambda graph, target: None)
        monkeypatch.setattr(runner, "pipeline", lambda: (fake,))
        opt = OptConfig(verify=True)
        opt.passes.canonicalize.enabled = True
        return lower(tiny_traced("llama", dtype=dtype), opt, TARGET)

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_epsilon_is_found_where_it_is(wrong, dtype):
    def other_epsilon(graph, ctx):
        nodes = [n for n in graph.nodes if n.target is aten.add.Tensor and n.args[1] == 1e-6]
        nodes[2].update_arg(1, 0.1)
        return 1

    place = r"first difference: add\S* \(model\.layers\.1\.input_layernorm\)"
    with pytest.raises(PassError, match=place):
        wrong(other_epsilon, dtype)


def test_swapped_gate_and_up_are_found(wrong):
    def swap(graph, ctx):
        silu = next(n for n in graph.nodes if n.target is aten.silu.default)
        [product] = silu.users
        gate, up = silu.args[0], product.args[1]
        gate_weight, up_weight = gate.args[1], up.args[1]
        gate.update_arg(1, up_weight)
        up.update_arg(1, gate_weight)
        return 1

    with pytest.raises(
        PassError, match=r"first difference: linear_4 \(model.layers.0.mlp.gate_proj\)"
    ):
        wrong(swap)


def test_a_wrong_weight_plan_is_found(wrong):
    def wrong_source(graph, ctx):
        names = [f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)]
        node = next(n for n in graph.nodes if n.meta.get("weight") == names[0])
        other = next(n for n in graph.nodes if n.meta.get("weight") == names[1])
        node.replace_all_uses_with(other)
        graph.erase_node(node)
        return 1

    with pytest.raises(
        PassError, match=r"first difference: linear\S* \(model.layers.0.mlp.down_proj\)"
    ):
        wrong(wrong_source)


def test_an_exact_rewrite_passes(wrong):
    def twice_negated(graph, ctx):
        node = next(n for n in graph.nodes if n.target is aten.silu.default)
        x = node.args[0]
        once = insert_call(graph, node, aten.neg.default, (x,), node)
        node.update_arg(0, insert_call(graph, node, aten.neg.default, (once,), node))
        return 1

    [record] = wrong(twice_negated).records
    assert record.verified.error == 0.0


def test_relative_rmse_counts_what_is_not_finite():
    ones = torch.ones(4)
    assert relative_rmse(ones, ones) == 0.0
    assert relative_rmse(ones * 1.1, ones) == pytest.approx(0.1, rel=1e-5)
    assert relative_rmse(torch.tensor([1.0, torch.nan]), torch.ones(2)) == float("inf")
    assert relative_rmse(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
    both = torch.tensor([1.0, torch.inf])
    assert relative_rmse(both, both) == 0.0


def test_random_weights_are_the_same_in_every_reading():
    plan = tiny_traced("llama").weights
    name = "model.layers.0.mlp.down_proj.weight"
    one, other = RandomCheckpoint(plan).read(name, "float32"), RandomCheckpoint(plan)
    assert torch.equal(one, other.read(name, "float32"))
    assert not torch.equal(one, other.read(name.replace("0", "1"), "float32"))


def test_inputs_of_tiles_fit_their_placeholders():
    graph = tiny_traced("llama").graph
    tensors = random_tensors(graph, [7, 3])
    for node, tensor in zip(graph.find_nodes(op="placeholder"), tensors, strict=True):
        assert tensor.dtype == node.meta["val"].dtype
        assert tensor.ndim == node.meta["val"].ndim
