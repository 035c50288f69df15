"""The canonical order of a graph: decided by data flow, not by the order of tracing."""

import operator
import random

import torch
from torch import fx

from girih.graph.ir.order import canonical_order
from girih.graph.ir.text import graph_text


def shuffled(build, seed):
    """A graph whose nodes are in some order that data flow allows."""
    graph = fx.Graph()
    output = build(graph)
    nodes = [n for n in graph.nodes if n.op != "output"]
    chooser, placed = random.Random(seed), set()
    while nodes:
        ready = [n for n in nodes if placed.issuperset(n.all_input_nodes)]
        node = chooser.choice(ready)
        nodes.remove(node)
        placed.add(node)
        output.prepend(node)
    return graph


def diamond(graph):
    """Two independent branches, a dead end, weights, and inputs in the wrong order."""
    weights = [graph.placeholder(f"w{i}") for i in range(3)]
    rows, ids = graph.placeholder("rows"), graph.placeholder("ids")
    rows.meta["input"], ids.meta["input"] = "rows", "ids"
    left = graph.call_function(operator.mul, (weights[1], ids))
    right = graph.call_function(operator.neg, (ids,))
    for value in (left, right):
        graph.call_function(torch._check, (value,))
    total = graph.call_function(operator.add, (left, right))
    return graph.output(graph.call_function(operator.getitem, (total, rows)))


def test_every_order_of_one_computation_becomes_the_same():
    found = set()
    for seed in range(20):
        graph = shuffled(diamond, seed)
        canonical_order(graph, ("ids", "rows"))
        graph.lint()
        found.add(graph_text(graph))
    assert len(found) == 1


def test_inputs_first_then_weights_by_use_then_work_before_its_reader():
    graph = shuffled(diamond, 0)
    canonical_order(graph, ("ids", "rows"))
    names = [n.name for n in graph.nodes]
    assert names[:3] == ["ids", "rows", "w1"]
    assert names[5:9] == ["mul", "neg", "add", "getitem"]
    assert names[-1] == "output"


def test_a_long_chain_needs_no_deep_recursion():
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(5000):
        value = graph.call_function(operator.neg, (value,))
    graph.output(value)
    before = [n.name for n in graph.nodes]
    canonical_order(graph, ())
    assert [n.name for n in graph.nodes] == before
