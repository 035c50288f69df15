"""Modules that no graph can hold stay eager as steps of their own; the rest is tiles."""

import json
import re
from pathlib import Path

import pytest
import support_eager_model
import torch
from support_eager_model import write_spread
from support_models import opt_o2

from girih.conf.compose import compose_config, to_engine_config
from girih.graph.files.model_files import model_settings, save_model
from girih.graph.files.spec import load_spec
from girih.graph.ir.program import EagerStep, ProgramLayout, program_map
from girih.graph.ir.weight_plan import PLAIN
from girih.graph.tiles.inductor import eager_tile
from girih.graph.trace import eager_modules
from girih.graph.trace.call_form import CallForm, Unfit, form_of
from girih.graph.trace.eager_modules import build_eager_modules
from girih.graph.trace.trace import auto_class, build_on_meta, trace
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.kernels.base.errors import BundleError, EngineError, TraceError
from girih.kernels.base.target import Target, detect_isa
from girih.kernels.ops import eager as eager_ops
from girih.passes.build.build import lower_and_partition
from girih.passes.options import OptConfig
from girih.runtime.inspect.check_model import check_model, random_model
from girih.runtime.inspect.explain_page import _program
from girih.runtime.start import runnable_program
from girih.runtime.verify.batch_invariance import why_not_invariant
from girih.runtime.verify.model import bind, verify_model

TARGET = Target("cpu", detect_isa(), 2, "g++")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """transformers' model, and the spec of its checkpoint."""
    spec = load_spec(str(write_spread()), "float32")
    path = tmp_path_factory.mktemp("spread")
    made = random_model(auto_class(spec), model_settings(spec))
    save_model(made, path)
    return made, load_spec(str(path), "float32")


@pytest.fixture(scope="module")
def traced(model):
    return trace(model[1])


@pytest.fixture(scope="module")
def program(traced):
    opt = opt_o2()
    opt.verify = True
    return lower_and_partition(traced, opt, TARGET)[1]


def executable_of(program, spec, layout=None):
    tiles = {key: eager_tile(tile.graph) for key, tile in program.tiles.items()}
    with open_checkpoint(spec.files) as checkpoint:
        weights = load_weights(program.weights, checkpoint, program.constants, TARGET.isa)
    return bind(layout or program.layout, tiles, weights)


def eager_steps(layout):
    return [step for step in layout.steps if isinstance(step, EagerStep)]


def test_every_pass_leaves_the_model_s_logits(model, traced, program):
    one = OptConfig()
    one.passes.canonicalize.enabled = True
    plain = lower_and_partition(traced, one, TARGET)[1]
    for lowered in (plain, program):
        found = verify_model(model[0], executable_of(lowered, model[1]), 400, encodes=False)
        assert found.passed, found


def test_layers_share_the_function_and_pass_their_own_weights(program):
    first, second = eager_steps(program.layout)
    assert first.spec == second.spec and first.weights != second.weights
    assert len(program.layout.eager_specs) == 1
    assert first.spec.path == "model.layers.0.mlp.spread"
    names = {number: name for name, number in program.layout.weights.items()}
    taken = [names[number] for number in second.weights]
    assert taken == [f"model.layers.1.mlp.spread.{name}" for name in second.spec.weights]
    assert all(program.weights.entries[n].form == PLAIN for n in taken if "offset" not in n)


def test_the_map_says_class_place_and_reason(program):
    text = program_map(program.layout, {}, program.weights)
    assert "eager SpreadMLP, tile 2, attention" in text
    [line] = [t for t in text.splitlines() if t.startswith("eager ")]
    place = r"eager SpreadMLP \(support_eager_model.py:(\d+)\) × 2 as transformers wrote it: "
    number = int(re.match(place, line)[1])
    source = Path(support_eager_model.__file__).read_text().splitlines()
    assert ".tolist()" in source[number - 1]
    assert "Could not guard on data-dependent expression" in line


def test_the_page_shows_it(program):
    class Data:
        layout, notes = program.layout, {}

    assert "eager SpreadMLP (support_eager_model.py:" in _program(Data)


def test_a_layout_from_a_bundle_runs_without_a_trace(model, program, monkeypatch):
    layout = ProgramLayout.from_json(json.loads(json.dumps(program.layout.to_json())))
    assert layout == program.layout
    monkeypatch.setattr(eager_ops, "_functions", {})
    monkeypatch.setattr(eager_modules, "_specs", {})
    with pytest.raises(EngineError, match="nobody has built it in this process"):
        executable_of(program, model[1], layout)
    build_eager_modules(layout, lambda: build_on_meta(model[1]))
    found = verify_model(model[0], executable_of(program, model[1], layout), 400, encodes=False)
    assert found.passed, found


def test_another_module_in_its_place_is_refused(program):
    layout = program.layout
    with pytest.raises(BundleError, match="the model has no module"):
        build_eager_modules(layout, lambda: torch.nn.Linear(2, 2))


def test_its_bits_may_depend_on_the_batch(program):
    class Bound:
        layout = program.layout

    assert "SpreadMLP runs in plain torch" in why_not_invariant(Bound, object())


@pytest.mark.parametrize("change", ["mixes", "counts"])
def test_what_does_not_work_token_by_token_is_refused(change):
    spec = load_spec(str(write_spread(num_hidden_layers=1, **{change: True})))
    with pytest.raises(TraceError) as refusal:
        trace(spec)
    text = str(refusal.value)
    assert "could not be traced: Could not guard on data-dependent expression" in text
    assert "SpreadMLP cannot stay eager: it does not give a token alone what it gives it" in text


def test_a_call_form_survives_its_text():
    x = torch.zeros(1, 3)
    form, tensors = form_of((_with_tokens(), None), {"a": [x, 2.5], "b": ("c", True)})
    assert CallForm.from_text(form.as_text()) == form
    assert form.source == (0, 1) and len(tensors) == 2
    args, kwargs = form.arguments([torch.ones(1, 4, 8), x])
    assert args[0].shape == (1, 4, 8) and args[1] is None
    assert kwargs["a"] == [x, 2.5] and kwargs["b"] == ("c", True)


def _with_tokens(dtype=torch.float32):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    sizes = [DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(torch.zeros(1, 5, 8, dtype=dtype), symbolic_context=context)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (lambda: (torch.zeros(3),), "no row per token"),
        (lambda: (_with_tokens(), object()), "is called with a object"),
        (lambda: (_with_tokens(torch.int64),), "a number per token"),
    ],
)
def test_calls_that_cannot_be_written_down(arguments, reason):
    with pytest.raises(Unfit, match=reason):
        form_of(arguments(), {})


@pytest.mark.slow
def test_a_compiled_bundle_starts_without_a_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path))
    config = to_engine_config(compose_config("check", ["opt=O2", f"model={write_spread()}"]))
    built = check_model(config)
    assert built.result.passed, built.text
    monkeypatch.setattr(eager_ops, "_functions", {})
    monkeypatch.setattr("girih.passes.build.build.trace", None)
    monkeypatch.setattr(runnable_program, "trace", None)
    again = check_model(config)
    assert again.result.passed, again.text
