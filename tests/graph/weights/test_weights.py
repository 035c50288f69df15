"""Loading a plan: every form, every refusal, and no second copy in memory."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from support_models import program_of, tiny_model, tiny_traced

from girih.graph.files.sources import resolve_source
from girih.graph.ir.weight_plan import CONSTANT, PACKED, PLAIN, WeightEntry, WeightPlan
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.kernels.base.errors import WeightError
from girih.kernels.base.target import detect_isa
from girih.kernels.ops.packing import packed_shape, unpack_linear

# What a library loaded by another test reads; the references read any.
ISA = detect_isa()
TENSORS = {
    "q": torch.randn(6, 10),
    "k": torch.randn(3, 10),
    "v": torch.randn(3, 10),
    "bias_q": torch.randn(6),
    "bias_k": torch.randn(3),
    "scale": torch.tensor(3.0),
    "half": torch.randn(4, 2).bfloat16(),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights")
    (path / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    save_file(TENSORS, path / "model.safetensors")
    with open_checkpoint(resolve_source(str(path))) as opened:
        yield opened


def load(checkpoint, *entries, constants=None, progress=None):
    options = {"progress": progress} if progress else {}
    return load_weights(WeightPlan(list(entries)), checkpoint, constants or {}, ISA, **options)


def entry(name, shape, *sources, form=PLAIN, dtype="float32"):
    return WeightEntry(name, form, shape, dtype, sources or (name,))


def test_plain_and_merged_entries(checkpoint):
    loaded = load(
        checkpoint,
        entry("v", (3, 10)),
        entry("qkv", (12, 10), "q", "k", "v"),
        entry("bias", (9,), "bias_q", "bias_k"),
        entry("scale", ()),
    )
    assert list(loaded) == ["v", "qkv", "bias", "scale"]
    assert torch.equal(loaded["v"], TENSORS["v"])
    assert torch.equal(loaded["qkv"], torch.cat([TENSORS[n] for n in "qkv"]))
    assert torch.equal(loaded["bias"], torch.cat([TENSORS["bias_q"], TENSORS["bias_k"]]))
    assert loaded["scale"].item() == 3.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_entries_are_packed_source_by_source(checkpoint, dtype):
    loaded = load(checkpoint, entry("qkv", (12, 10), "q", "k", "v", form=PACKED, dtype=dtype))
    real = getattr(torch, dtype)
    assert tuple(loaded["qkv"].shape) == packed_shape(12, 10, real, ISA)
    wanted = torch.cat([TENSORS[n] for n in "qkv"]).to(real)
    assert torch.equal(unpack_linear(loaded["qkv"], 12, 10, ISA), wanted)


def test_values_are_cast_to_the_planned_dtype(checkpoint):
    loaded = load(checkpoint, entry("half", (4, 2)))
    assert loaded["half"].dtype == torch.float32
    assert torch.equal(loaded["half"], TENSORS["half"].float())


def test_constants_come_from_the_bundle_and_are_copied(checkpoint):
    value = torch.arange(4.0)
    loaded = load(checkpoint, entry("rope", (4,), form=CONSTANT), constants={"rope": value})
    assert torch.equal(loaded["rope"], value)
    assert loaded["rope"].data_ptr() != value.data_ptr()


def test_progress_names_each_entry(checkpoint):
    events = []
    load(checkpoint, entry("q", (6, 10)), entry("k", (3, 10)), progress=events.append)
    assert [(e.stage, e.done, e.total, e.detail) for e in events] == [
        ("weights", 0, 2, "q"),
        ("weights", 1, 2, "k"),
        ("weights", 2, 2, ""),
    ]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            entry("q", (6, 11)),
            r"tensor q has shape \[6, 10\]; the configuration asks for \[6, 11\]",
        ),
        (entry("q", (5, 10)), r"asks for \[5, 10\]"),
        (entry("q", (7, 10)), "q needs 7 rows; its sources q have 6"),
        (entry("qk", (8, 10), "q", "k"), r"tensor k has shape \[3, 10\].*\[8, 10\] rows in all"),
        (entry("qk", (10, 10), "q", "k"), "qk needs 10 rows; its sources q, k have 9"),
        (entry("q", (6,)), r"tensor q has shape \[6, 10\]"),
        (entry("q", ()), r"tensor q has shape \[6, 10\]"),
        (entry("scale", (1,)), r"tensor scale has shape \[\]"),
        (entry("q", (6, 12), form=PACKED), r"asks for \[6, 12\]"),
        (entry("absent", (6, 10)), "absent"),
    ],
)
def test_refusals_name_the_tensor(checkpoint, bad, message):
    with pytest.raises(WeightError, match=message):
        load(checkpoint, bad)


def test_a_models_plan_loads_from_its_own_checkpoint():
    program = program_of(tiny_traced("llama"), ISA)
    with open_checkpoint(resolve_source(str(tiny_model("llama")))) as checkpoint:
        loaded = load_weights(program.weights, checkpoint, program.constants, ISA)
        assert set(loaded) == set(program.weights.entries)
        name = "model.layers.1.self_attn.{q_proj,k_proj,v_proj}.weight"
        q = checkpoint.read("model.layers.1.self_attn.q_proj.weight", "float32")
        assert torch.equal(unpack_linear(loaded[name], 128, 64)[:64], q)


MEASURE = """
import resource, sys, torch
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.files.sources import resolve_source
from girih.graph.ir.weight_plan import PACKED, WeightEntry, WeightPlan
from girih.graph.weights.load import load_weights
names = [f"w{i}" for i in range(24)]
entries = [WeightEntry(f"m{i}", PACKED, (2048, 1024), "float32", (names[2 * i], names[2 * i + 1]))
           for i in range(12)]
with open_checkpoint(resolve_source(sys.argv[1])) as checkpoint:
    torch.ops.girih.pack_linear_(torch.zeros(64, 1024, 16), checkpoint.read("w0", "float32"), 0)
    anonymous = lambda: int(next(
        l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) * 1024
    before, peak = anonymous(), 0
    def watch(event):
        global peak
        peak = max(peak, anonymous())
    loaded = load_weights(WeightPlan(entries), checkpoint, {}, "avx2", watch)
size = sum(t.nbytes for t in loaded.values())
print(size, peak - before)
"""


def test_peak_is_the_weights_and_no_second_copy(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    save_file({f"w{i}": torch.ones(1024, 1024) for i in range(24)}, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    size, grown = map(int, done.stdout.split())
    assert size == 24 * 4 * 2**20
    assert grown < 1.35 * size, f"{grown / 2**20:.0f} MiB more for {size / 2**20:.0f} MiB"
