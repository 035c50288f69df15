"""Stamped layers: the graph is the one that tracing every layer gives, or every layer is traced."""

import pytest
import torch
from support_models import hf_config, hf_model, tiny_model

import girih.graph.stamp as stamp
from girih.graph.spec import load_spec
from girih.graph.trace import trace


def stamped_and_full(monkeypatch, spec):
    """Trace twice; return both and how many layers were stamped."""
    counts = []
    expand = stamp.LayerStamps.expand

    def counting(self, graph, names):
        counts.append(expand(self, graph, names))
        return counts[-1]

    with monkeypatch.context() as patch:
        patch.setattr(stamp.LayerStamps, "expand", counting)
        stamped = trace(spec)
    with monkeypatch.context() as patch:
        patch.setattr(stamp, "MIN_LAYERS", 1000)
        full = trace(spec)
    return stamped, full, sum(counts)


@pytest.mark.parametrize(
    ("kind", "changes", "copies"),
    [
        # Traced: the first two and the last of each kind.
        ("llama", {"num_hidden_layers": 6}, 3),
        (
            "gemma3_text",
            {"num_hidden_layers": 7, "layer_types": ["sliding_attention"] * 6 + ["full_attention"]},
            3,
        ),
        ("gpt2", {"n_layer": 5, "num_hidden_layers": 5}, 2),
    ],
)
def test_same_graph_as_tracing_every_layer(monkeypatch, kind, changes, copies):
    spec = load_spec(str(tiny_model(kind, **changes)))
    stamped, full, stamped_layers = stamped_and_full(monkeypatch, spec)
    assert stamped_layers == copies
    assert stamped.as_text() == full.as_text()
    assert stamped.weights.to_json() == full.weights.to_json()


class Block(torch.nn.Module):
    def __init__(self, size: int, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.eps = 1e-6
        self.linear = torch.nn.Linear(size, size)

    def forward(self, x, shift, flag=None):
        return self.linear(x + shift) + self.eps


class Hidden(Block):
    def forward(self, x, shift, flag=None):
        return self.linear(x + shift) * (self.layer_idx + 1)


class Stateful(Block):
    def forward(self, x, shift, flag=None):
        flag.append(x)
        return self.linear(sum(flag[-2:]))


class Stack(torch.nn.Module):
    def __init__(self, layers, arguments=None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.arguments = arguments or (lambda index, x: (x + 1, None))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x, *self.arguments(index, x))
        return x


def export(stack):
    x = torch.zeros(5, 4, device="meta")
    rows = torch.export.Dim("T", min=2, max=64)
    return torch.export.export(stack, (x,), dynamic_shapes=({0: rows},), strict=False)


def stamped(stack):
    """Export with stamps, expanded; returns (program, layers stamped)."""
    with stamp.LayerStamps(stack) as stamps:
        program = export(stack)
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    count = stamps.expand(program.graph, names)
    return program, count


def blocks(count, kind=Block):
    return [kind(4, index) for index in range(count)]


def test_stamped_layers_compute_with_their_own_weights():
    torch.manual_seed(0)
    stack = Stack(blocks(6))
    real = {name: value.clone() for name, value in stack.state_dict().items()}
    program, count = stamped(stack.to("meta"))
    assert count == 3
    inputs = [real[n] for n in program.graph_signature.parameters]
    x = torch.randn(7, 4)
    got = torch.fx.Interpreter(torch.fx.GraphModule({}, program.graph)).run(*inputs, x)
    model = Stack(blocks(6))
    model.load_state_dict(real)
    torch.testing.assert_close(got[0], model(x))


def test_forward_is_the_class_s_own_afterwards():
    stack = Stack(blocks(5)).to("meta")
    stamped(stack)
    assert all("forward" not in vars(layer) for layer in stack.layers)


def test_a_layer_with_another_setting_is_traced_by_itself():
    layers = blocks(7)
    layers[3].eps = 1e-5
    program, count = stamped(Stack(layers).to("meta"))
    assert count == 3  # seven, less the first two and the last of the kind, less the odd one
    constants = [n.args[1] for n in program.graph.nodes if n.args and 1e-5 in n.args]
    assert constants == [1e-5]


def test_a_kind_whose_last_layer_is_called_otherwise_is_not_proven():
    def arguments(index, x):
        return (x + 1, index in (1, 2, 3))

    with pytest.raises(stamp.StampError, match="compute alike"):
        stamped(Stack(blocks(6), arguments).to("meta"))


def test_a_layer_that_computes_with_its_number_is_an_error():
    with pytest.raises(stamp.StampError, match="compute alike"):
        stamped(Stack(blocks(5, Hidden)).to("meta"))


def test_arguments_that_may_hold_state_are_traced_in_full():
    state = Notes()
    stack = Stack(blocks(5, Stateful), lambda index, x: (x, state)).to("meta")
    _, count = stamped(stack)
    assert count == 0


class Notes:
    """An opaque argument: what layers do with it is unknown."""

    def __init__(self):
        self.items = []

    def append(self, item):
        self.items.append(item)

    def __getitem__(self, key):
        return self.items[key]


def test_layers_that_share_weights_are_traced_in_full():
    shared = Block(4, 0)
    _, count = stamped(Stack([shared] * 6).to("meta"))
    assert count == 0


def test_per_layer_configuration_entries_make_kinds():
    config = hf_config("llama", num_hidden_layers=6)
    config.mlp_only_layers = [2]
    layers = hf_model(config).model.layers
    marks = [stamp.fingerprint(layer, index) for index, layer in enumerate(layers)]
    assert len({*marks[:2], *marks[3:]}) == 1
    assert marks[2] != marks[0]
