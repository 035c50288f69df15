"""Stamped layers: the graph is the one that tracing every layer gives, or every layer is traced."""

import functools

import pytest
import torch
from support_models import hf_config, hf_model, tiny_model
from transformers.models.llama import modeling_llama

import girih.graph.trace.stamp as stamp
from girih.graph.files.spec import load_spec
from girih.graph.trace.trace import trace


def stamped_and_full(monkeypatch, spec):
    """Trace twice; return both and how many layers were stamped."""
    counts = []
    expand = stamp.LayerStamps.expand

    def counting(self, program):
        counts.append(expand(self, program))
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


def test_a_model_that_looks_into_its_layers_is_traced_with_all_in_sight(monkeypatch):
    spec = load_spec(str(tiny_model("llama", num_hidden_layers=6)))
    usual = trace(spec)
    forward = modeling_llama.LlamaModel.forward

    @functools.wraps(forward)
    def looking(self, *args, **kwargs):
        assert self.layers[3].mlp is not None
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", looking)
    looked, _, copies = stamped_and_full(monkeypatch, spec)
    assert copies == 3
    assert looked.as_text() == usual.as_text()


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


def stamped(stack, hides=False):
    """Export with stamps, expanded; returns (program, layers stamped)."""
    with stamp.LayerStamps(stack, hides) as stamps:
        program = export(stack)
    return program, stamps.expand(program)


def blocks(count, kind=Block):
    return [kind(4, index) for index in range(count)]


class Buffered(Block):
    def __init__(self, size: int, layer_idx: int) -> None:
        super().__init__(size, layer_idx)
        self.register_buffer("scale", torch.rand(size))
        self.register_buffer("offset", torch.rand(size), persistent=False)

    def forward(self, x, shift, flag=None):
        return self.linear(x + shift) * self.scale + self.offset


def own_tensors(stack):
    tensors = {**dict(stack.named_parameters()), **dict(stack.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def inputs_of(program, tensors):
    """Tensors in the order in which the program takes them; its signature names them."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    placeholders = program.graph.find_nodes(op="placeholder")
    assert [spec.arg.name for spec in signature.input_specs] == [n.name for n in placeholders]
    return [tensors[names[n.name]] for n in placeholders if n.name in names]


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("kind", [Block, Buffered])
def test_stamped_layers_compute_with_their_own_weights(kind, hides):
    torch.manual_seed(0)
    stack = Stack(blocks(6, kind))
    tensors, x = own_tensors(stack), torch.randn(7, 4)
    expected = stack(x)
    program, count = stamped(stack.to("meta"), hides)
    assert count == 3
    module = torch.fx.GraphModule({}, program.graph)
    got = torch.fx.Interpreter(module).run(*inputs_of(program, tensors), x)
    torch.testing.assert_close(got[0], expected)


def test_a_program_with_stamped_layers_is_a_whole_one():
    stack = Stack(blocks(6, Buffered)).to("meta")
    tensors = own_tensors(stack)
    program, _ = stamped(stack, hides=True)
    kept = {name for name in tensors if not name.endswith("offset")}
    assert set(program.state_dict) == kept
    assert set(program.constants) == set(tensors) - kept
    program.validate()
    assert len(program.run_decompositions({}).graph_signature.input_specs) == len(tensors) + 1


def test_hidden_layers_are_not_exported_and_are_there_again_afterwards():
    stack = Stack(blocks(40)).to("meta")
    names = set(own_tensors(stack))
    with stamp.LayerStamps(stack, hides=True):
        program = export(stack)
    assert len(program.graph_signature.parameters) == 3 * 2
    assert set(own_tensors(stack)) == names


def failure(stack):
    """What an export with hidden layers fails with, and whether they are the reason."""
    with pytest.raises(Exception) as failed, stamp.LayerStamps(stack, hides=True) as stamps:
        export(stack)
    return str(failed.value), stamps.must_show(failed.value)


def test_a_hidden_layer_that_is_called_otherwise_has_to_be_seen():
    stack = Stack(blocks(7), lambda index, x: (x + 1, index == 3)).to("meta")
    words, must_show = failure(stack)
    assert must_show
    assert "layers.3 is called otherwise" in words
    assert stamped(stack)[1] == 3


class Looking(Stack):
    def forward(self, x):
        return super().forward(x) + self.layers[3].linear.weight.sum()


class Failing(Stack):
    def forward(self, x):
        raise ValueError("of its own")


def test_code_that_looks_into_a_hidden_layer_has_to_see_it():
    words, must_show = failure(Looking(blocks(6)).to("meta"))
    assert must_show
    assert "linear" in words
    words, must_show = failure(Failing(blocks(6)).to("meta"))
    assert not must_show
    assert words == "of its own"


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
