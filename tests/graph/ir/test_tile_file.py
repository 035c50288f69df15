"""Tiles as JSON: what is read back prints, runs and compiles like the original."""

import json
import subprocess
import sys

import pytest
import torch
from support_graphs import capture, values
from support_models import program_of, tiny_traced
from torch import fx

from girih.graph.ir.random_values import random_tensors
from girih.graph.ir.text import graph_text
from girih.graph.ir.tile_file import read_tile, tile_from_json, tile_to_json, write_tile
from girih.graph.tiles.inductor import _example_inputs, eager_tile
from girih.kernels.base.errors import BundleError


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_of_models(kind, dtype, tmp_path):
    for tile in program_of(tiny_traced(kind, dtype=dtype)).tiles.values():
        write_tile(tile.graph, tmp_path / "tile.json")
        again = read_tile(tmp_path / "tile.json")
        assert graph_text(again) == tile.text


@pytest.mark.parametrize("shapes", [True, False])
def test_same_results(shapes):
    program = program_of(tiny_traced("llama"))
    for tile in program.tiles.values():
        inputs = [_filled(n.meta["val"]) for n in tile.graph.find_nodes(op="placeholder")]
        again = tile_from_json(json.loads(json.dumps(tile_to_json(tile.graph))), shapes=shapes)
        for got, wanted in zip(
            eager_tile(again)(inputs), eager_tile(tile.graph)(inputs), strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def _filled(value):
    shape = [s if isinstance(s, int) else 11 for s in value.shape]
    if value.dtype == torch.int64:
        return torch.arange(shape[0])
    return torch.randn(shape, dtype=value.dtype)


def every_kind_of_argument(x):
    y = torch.clamp(x, min=-0.1, max=float("inf")) * 0.1
    y = y.to(torch.bfloat16).to(memory_format=torch.contiguous_format, dtype=torch.float32)
    z = torch.zeros(x.shape[0] * 2 + 1, 8, device=x.device, dtype=torch.float32)
    return torch.cat([torch.split(y, 4, -1)[1], z[: x.shape[0], :4]], -1).masked_fill(x > 0, -1e30)


def test_every_kind_of_argument():
    captured = capture(every_kind_of_argument, {}, {"x": ("T", 8)})
    for node in captured.graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
    ):
        captured.graph.erase_node(node)
    [zeros] = captured.graph.find_nodes(op="call_function", target=torch.ops.aten.zeros.default)
    zeros.update_kwarg("device", torch.device("cpu"))
    output = next(n for n in captured.graph.nodes if n.op == "output")
    output.args = ((output.args[0],),)
    again = tile_from_json(json.loads(json.dumps(tile_to_json(captured.graph))))
    assert graph_text(again) == graph_text(captured.graph)
    [x] = values({"x": ("T", 8)})
    [got] = fx.GraphModule({}, again)(x)
    torch.testing.assert_close(got, every_kind_of_argument(x), rtol=0, atol=0)


def test_unknown_operator_is_named():
    data = {
        "inputs": [{"dtype": "float32", "shape": ["s0", 4]}],
        "calls": [{"op": "girih.lost_op.default", "args": [{"%": 0}]}],
        "outputs": [1],
    }
    with pytest.raises(BundleError, match=r"operator girih\.lost_op\.default"):
        tile_from_json(data)


def test_argument_that_no_file_can_hold_is_named():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    node = graph.call_function(torch.ops.aten.mul.Tensor, (x, 1j))
    graph.output((node,))
    with pytest.raises(BundleError, match="complex"):
        tile_to_json(graph)


def test_a_process_that_reads_tiles_needs_nothing_else_for_their_operators(tmp_path):
    """What compiles tiles and what starts from a bundle import no tracing."""
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    traced = tiny_traced("qwen3_moe", num_hidden_layers=1, head_dim=16, **changes)
    tiles = program_of(traced).tiles.values()
    for number, tile in enumerate(tiles):
        write_tile(tile.graph, tmp_path / f"{number}.json")
    assert any("girih.expert_linear" in tile.text for tile in tiles)
    program = (
        "import sys, pathlib\n"
        "from girih.graph.ir.tile_file import read_tile\n"
        "for path in pathlib.Path(sys.argv[1]).glob('*.json'): read_tile(path, shapes=False)\n"
        "assert 'girih.graph.trace.trace' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]


def test_an_input_of_a_multiple_of_the_tokens_keeps_that_relation():
    """Heads and tokens flattened into one dimension stand beside tokens alone (Qwen3-Next)."""
    data = {
        "inputs": [
            {"dtype": "float32", "shape": ["4*s26", 3]},
            {"dtype": "float32", "shape": ["s26", 3]},
            {"dtype": "float32", "shape": ["s7"]},
            {"dtype": "float32", "shape": ["s9"]},
        ],
        "calls": [
            {"op": "aten.view.default", "args": [{"%": 0}, [-1, 4, 3]]},
            {"op": "aten.select.int", "args": [{"%": 4}, 1, 0]},
            {"op": "aten.add.Tensor", "args": [{"%": 1}, {"%": 5}]},
        ],
        "outputs": [6, 2, 3],
    }
    graph = tile_from_json(data)
    assert "f32[d0, 3] = aten.add.Tensor" in graph_text(graph)
    inputs = random_tensors(graph, [5, 2, 3])
    assert [tuple(x.shape) for x in inputs] == [(20, 3), (5, 3), (2,), (3,)]
    eager_tile(graph)(inputs)
    examples, dynamic = _example_inputs(graph)
    assert [tuple(x.shape) for x in examples] == [(4 * 37, 3), (37, 3), (23,), (9,)]
    exported = torch.export.export(fx.GraphModule({}, graph), examples, dynamic_shapes=dynamic)
    sizes = [n.meta["val"].shape[0] for n in exported.graph.find_nodes(op="placeholder")]
    assert sizes[0].node.expr == 4 * sizes[1].node.expr
    assert len({str(s) for s in sizes}) == 4


def test_operators_whose_kernels_know_no_symbolic_shape():
    """Their shape comes from torch's rules in Python (RecurrentGemma's gates)."""
    shapes = {"input": (4, 1, 3), "batch1": (4, "T", 5), "batch2": (4, 5, 3)}
    graph = capture(torch.baddbmm, {}, shapes).graph
    again = tile_from_json(json.loads(json.dumps(tile_to_json(graph))))
    assert graph_text(again) == graph_text(graph)
    assert "[4, d0, 3] = aten.baddbmm" in graph_text(again)
