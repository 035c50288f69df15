"""The program map and the records behind it."""

from girih.graph.ir.program import AttentionStep, ProgramLayout, TileStep, program_map
from girih.graph.ir.weight_plan import WeightEntry, WeightPlan
from girih.kernels.attention.backends import AttentionSpec

FULL = AttentionSpec(4, 2, 16, 16, 0.25)
LOCAL = AttentionSpec(4, 2, 16, 16, 0.25, window=8, softcap=30.0)


def layout(layers, specs=(FULL,)):
    """first, (attention, middle) × (layers - 1), attention, last."""
    steps = [TileStep("aaaa", 0, (0, 1), (2,))]
    for i in range(layers):
        spec = specs[i % len(specs)]
        steps.append(AttentionStep(i, spec, 2, 2, 2, None, 3))
        steps.append(TileStep("bbbb" if i < layers - 1 else "cccc", i + 1, (3,), (2,)))
    return ProgramLayout(tuple(steps), {"ids": 0}, {"w": 1}, 4, 2)


PLAN = WeightPlan(
    [
        WeightEntry("w", "plain", (1 << 20, 128), "float32", ("w",)),
        WeightEntry("qkv", "packed", (1 << 20, 256), "bfloat16", ("q", "k", "v")),
    ]
)
NOTES = {"aaaa": "first", "bbbb": "middle", "cccc": "last"}


def test_map_of_a_model():
    assert program_map(layout(8), NOTES, PLAN) == (
        "steps 17: tile 0, (attention, tile 1) × 7, attention, tile 2\n"
        "tile 0 aaaa  × 1 piece: first\n"
        "tile 1 bbbb  × 7 pieces: middle\n"
        "tile 2 cccc  × 1 piece: last\n"
        "weights 2 tensors, 1.00 GiB\n"
        "kv slots 8 × 4 heads, 2 kv, dim 16\n"
    )


def test_map_of_two_layers_has_no_run():
    first = program_map(layout(2), NOTES, PLAN).splitlines()[0]
    assert first == "steps 5: tile 0, attention, tile 1, attention, tile 2"


def test_map_counts_kinds_of_attention():
    text = program_map(layout(4, (LOCAL, LOCAL, FULL)), {}, PLAN)
    assert text.splitlines()[-1] == (
        "kv slots 3 × 4 heads, 2 kv, dim 16, window 8, soft cap 30; 1 × 4 heads, 2 kv, dim 16"
    )


def test_records_survive_plain_data():
    original = layout(4, (LOCAL, FULL))
    assert ProgramLayout.from_json(original.to_json()) == original
    assert WeightPlan.from_json(PLAN.to_json()).entries == PLAN.entries


def test_plan_text_and_restriction():
    assert PLAN.as_text().splitlines()[1] == ("packed   bfloat16[1048576, 256]  qkv  <- 3 tensors")
    assert list(PLAN.restrict({"qkv"}).entries) == ["qkv"]
    assert [e.num_bytes for e in PLAN.entries.values()] == [1 << 29, 1 << 29]
