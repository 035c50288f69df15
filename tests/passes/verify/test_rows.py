"""Tiles run on tokens together and apart: what looks at other tokens is refused and named."""

import dataclasses

import pytest
import torch
from support_graphs import capture
from support_models import opt_o2, program_of, tiny_traced
from torch import fx

from girih.graph.partition.partition import partition
from girih.graph.trace.fail_closed import check_captured
from girih.kernels.base.errors import TraceError
from girih.kernels.base.target import Target, detect_isa
from girih.passes.build.build import lower_and_partition
from girih.passes.verify.rows import verify_rows

TARGET = Target("cpu", detect_isa(), 2, "g++")

torch.library.define("girih_test::neighbour", "(Tensor x) -> Tensor")


@torch.library.impl("girih_test::neighbour", "CPU")
def _neighbour(x):
    return x.roll(1, 0 if x.ndim == 2 else 1)


torch.library.register_fake("girih_test::neighbour", lambda x: torch.empty_like(x))


def program(function, weights=(("w", (8, 8)),), inputs=(("x", ("T", 8)),), dtype=torch.float32):
    """A program of two tiles; `function` takes the inputs, then the weights."""

    def step(*given):
        weights_given, (*inputs_given, logits_index) = given[: len(weights)], given[len(weights) :]
        q = function(*inputs_given, *weights_given).view(-1, 2, 4)
        out = torch.ops.girih.attention(q, q, q, 0.5, True, 0, 0.0, None)
        return out.reshape(-1, 8).index_select(0, logits_index)

    captured = capture(step, dict(weights), {**dict(inputs), "logits_index": ("S",)}, dtype)
    check_captured(captured.graph, "OddForCausalLM")
    captured.tidy()
    return partition(captured.graph, captured.context.weights, {}), captured.symbols


def tried(*args, **options):
    split, symbols = program(*args, **options)
    return verify_rows(split, symbols, "OddForCausalLM")


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x, w: torch.cummax(x, 0)[0], "aten.cummax"),
        (lambda x, w: torch.ops.girih_test.neighbour(x), "girih_test.neighbour"),
        (lambda x, w: x.renorm(2, 1, 60.0), "aten.renorm"),
        (lambda x, w: torch.logcumsumexp(x[None], 1)[0], "aten.logcumsumexp"),
        # A part in ten million of another token is no rounding.
        (lambda x, w: (x @ w) + 1e-7 * torch.cummax(x, 0)[0], "aten.cummax"),
        (lambda x, w: torch.nn.functional.linear(torch.cummin(x @ w, 0)[0], w), "aten.cummin"),
        (lambda x, w: x * torch.cummax(x[:, :1], 0)[1], "aten.cummax"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_looks_at_other_tokens_is_refused(function, name, dtype):
    with pytest.raises(TraceError, match=rf"OddForCausalLM: {name}.* gives a token something else"):
        tried(function, dtype=dtype)


IDS = (("ids", ("T",)),)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lambda x, w: torch.nn.functional.linear(x, w), {}),
        (lambda x, w: torch.softmax(x, -1) * x.mean(-1, keepdim=True), {}),
        (lambda x, w: torch.addmm(w[0], x, w.t()).cumsum(1), {}),
        (lambda x, w: x[None].transpose(1, 2).transpose(1, 2)[0] @ w, {}),
        (lambda x, w: (x.reshape(-1, 2) * w[0, :2]).reshape(-1, 8), {}),
        (lambda x, w: x / torch.arange(1, 9, device="meta") + torch.ones_like(x) @ w, {}),
        (lambda x, w: torch.view_as_complex(x.float().view(-1, 4, 2)).abs().repeat(1, 2), {}),
        (lambda x, w: torch.bmm(x[None].expand(3, -1, -1), w).sum(0),
         {"weights": (("w", (3, 8, 8)),)}),
        (lambda x, w: torch.ops.girih.expert_linear(x, w, None, x.topk(2, -1)[1] % 3, False).sum(1),
         {"weights": (("w", (3, 8, 8)),)}),
        (lambda ids, w: torch.nn.functional.embedding(ids, w), {"inputs": IDS}),
        (lambda ids, w: torch.nn.functional.embedding(ids, w),
         {"inputs": IDS, "weights": (("w", (2, 8)),)}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_works_by_token_passes(function, options, dtype):
    result = tried(function, dtype=dtype, **options)
    assert result.passed and result.compared.startswith("2 tiles")
    assert result.error < 1e-12


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("gemma2", {"head_dim": 16}),
    ],
)
def test_models_pass_at_every_level(kind, changes):
    traced = tiny_traced(kind, **changes)
    opt = opt_o2()
    opt.passes.gather_last_rows.enabled = opt.passes.pack_linears.enabled = False
    for split in (program_of(traced), lower_and_partition(traced, opt, TARGET)[1]):
        assert 0 <= split.rows.error < 1e-12 < split.rows.bound
        assert f"rows verified: {len(split.tiles)} tiles, " in split.rows.as_text()


def mixing(traced, target):
    """A traced model whose layers do something between tokens on the way out of the MLP."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(traced.graph, {}))
    products = graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    down = next(n for n in products if "down_proj" in str(n.meta["nn_module_stack"]))
    with graph.inserting_after(down):
        mixed = graph.call_function(target, (down,))
    mixed.meta = dict(down.meta)
    down.replace_all_uses_with(mixed, delete_user_cb=lambda user: user is not mixed)
    return dataclasses.replace(traced, graph=graph)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_build_names_tile_module_and_line(gathers):
    traced = mixing(tiny_traced("llama"), torch.ops.girih_test.neighbour.default)
    opt = opt_o2()
    opt.passes.gather_last_rows.enabled = gathers
    with pytest.raises(TraceError) as caught:
        lower_and_partition(traced, opt, TARGET)
    message = str(caught.value)
    place = "girih_test.neighbour.default at model.layers.0.mlp.down_proj (modeling_llama.py:"
    assert f"LlamaForCausalLM: {place}" in message
    assert "mix the sequences of a step" in message
    assert "(tile " in message


def test_numbers_that_show_nothing_are_refused():
    with pytest.raises(TraceError, match=r"gives no finite number on random values"):
        tried(lambda x, w: x * float("nan"))


def test_a_tile_that_does_not_run_is_named():
    torch.library.define("girih_test::broken", "(Tensor x) -> Tensor")
    torch.library.register_fake("girih_test::broken", lambda x: torch.empty_like(x))
    with pytest.raises(TraceError, match=r"girih_test.broken.default .*does not run on 7 tokens"):
        tried(lambda x, w: torch.ops.girih_test.broken(x))


def test_no_weight_is_made_in_full():
    """The weights of this model would be half a terabyte."""
    weights = (("up", (1 << 18, 8)), ("down", (1 << 18, 1 << 18)), ("table", (1 << 18, 8)))

    def function(ids, up, down, table):
        hidden = torch.nn.functional.embedding(ids, table)
        wide = torch.nn.functional.linear(hidden, up)
        return torch.nn.functional.linear(wide, down)[:, :8]

    assert tried(function, weights, IDS).error < 1e-12
