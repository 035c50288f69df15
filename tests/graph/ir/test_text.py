"""Canonical text: equal computations have equal text, different ones do not."""

from typing import Any

import torch
from support_graphs import capture
from torch import fx

from girih.graph.ir.text import SymbolNames, digest, graph_text, target_name

X = {"x": ("T", 8)}


def text(function, inputs=X, dtype=torch.float32):
    return graph_text(capture(function, {}, inputs, dtype).graph)


def test_shape_of_a_line():
    assert text(lambda x: x * 2) == (
        "%0: f32[d0, 8] = input\n%1: f32[d0, 8] = aten.mul.Tensor(%0, 2)\nreturn [%1]\n".replace(
            "[%1]", "%1"
        )
    )


def test_names_do_not_matter():
    captured = capture(lambda x: torch.sin(x) + 1, {}, X)
    before = graph_text(captured.graph)
    for number, node in enumerate(captured.graph.nodes):
        node._rename(f"other_{number}")
    assert graph_text(captured.graph) == before


def test_symbols_are_numbered_by_first_appearance():
    both = text(lambda x, y: x.sum() + y.sum(), {"x": ("T", 8), "y": ("S", 8)})
    swapped = text(lambda x, y: x.sum() + y.sum(), {"x": ("S", 8), "y": ("T", 8)})
    assert both == swapped
    assert "f32[d0, 8] = input\n%1: f32[d1, 8] = input" in both


def test_known_symbols_keep_their_name():
    captured = capture(lambda x: x.reshape(-1), {}, X)
    assert "f32[8*T]" in captured.text


def test_sizes_in_arguments_are_values():
    line = text(lambda x: x.new_zeros(x.shape[0], 2)).splitlines()[-2]
    assert "aten.new_zeros.default(%0, [%1, 2]" in line


def test_strides_are_shown_when_not_contiguous():
    assert "%1: f32[8, d0] strides[1, 8] = aten.transpose.int(%0, 0, 1)" in text(
        lambda x: x.transpose(0, 1)
    )


def test_dtype_constants_and_keyword_arguments_are_part_of_the_text():
    texts = [
        text(lambda x: x * 2),
        text(lambda x: x * 2.0),
        text(lambda x: x * 3),
        text(lambda x: x * 2, dtype=torch.bfloat16),
        text(lambda x: x.sum(0)),
        text(lambda x: x.sum(1)),
        text(lambda x: torch.nn.functional.gelu(x)),
        text(lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ]
    assert len(set(texts)) == len(texts)
    assert "approximate='tanh'" in texts[-1]


def test_several_results():
    lines = text(lambda x: torch.split(x, 4, -1)).splitlines()
    assert "(f32[d0, 4] strides[8, 1], f32[d0, 4] strides[8, 1])" in lines[1]
    assert lines[-1] == "return [%2, %3]"


def test_notes_are_comments():
    captured = capture(lambda x: x + 1, {}, X)
    noted = graph_text(captured.graph, note=lambda n: "here" if n.op != "placeholder" else "")
    assert noted.splitlines()[1].endswith("# here")
    assert "#" not in graph_text(captured.graph)


def test_an_own_symbol_inside_a_longer_one():
    class Size:
        class node:
            class expr:
                free_symbols = ("s1", "s12")

                def __str__(self):
                    return "s1 + s12"

    size: Any = Size()
    size.node.expr = Size.node.expr()
    assert SymbolNames({"s1": "A", "s12": "B"}).text(size) == "A + B"


def test_target_names():
    assert target_name(torch.ops.aten.mul.Tensor) == "aten.mul.Tensor"
    assert target_name("f") == "f"
    import operator

    assert target_name(operator.add) == "operator.add"


def test_digest_is_short_and_depends_on_the_text():
    assert len(digest("a")) == 16
    assert digest("a") != digest("b")


def test_a_graph_without_values_still_prints():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,)))
    assert "%1: none = " in graph_text(graph)
