"""The guard strings lists through any graph without tying knots, and holds nothing once it was told to pause."""

from __future__ import annotations

import gc
import random
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from retrograd.core.hooks.reach import FREE_DEPTH, DeepGraphGuard


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Pulse:
    """Knows which nodes are alive, by the table of hooks that each has."""

    def __init__(self) -> None:
        self.tables: list[weakref.ref[Any]] = []

    def feel(self, tensor: Tensor) -> None:
        node = tensor.grad_fn
        assert node is not None
        tensor._backward_hooks = table = OrderedDict()
        node._register_hook_dict(tensor)  # type: ignore[attr-defined]
        self.tables.append(weakref.ref(table))

    @property
    def alive(self) -> int:
        return sum(table() is not None for table in self.tables)


def chain(length: int, guard: DeepGraphGuard, pulse: Pulse) -> tuple[Tensor, list[Any]]:
    x = torch.ones(1, requires_grad=True)
    nodes = []
    for _ in range(length):
        x = x * 1.0
        pulse.feel(x)
        nodes.append(x.grad_fn)
    return x, nodes


def is_anchored(node: Any) -> bool:
    return "retrograd.seen_before" in node.metadata


@pytest.mark.parametrize("order", ["forward", "backward", "mixed", "twice", "again and again"])
def test_every_node_dies_with_its_graph_in_whatever_order_they_were_seen(order: str) -> None:
    guard, pulse = DeepGraphGuard(), Pulse()
    x, nodes = chain(6 * FREE_DEPTH, guard, pulse)
    if order == "backward":
        nodes.reverse()
    elif order == "mixed":
        random.Random(3).shuffle(nodes)
    elif order == "twice":
        nodes += nodes
    elif order == "again and again":
        nodes = nodes[:50] * 20 + nodes
    for node in nodes:
        guard.saw(node)
    guard.restart()
    assert any(is_anchored(node) for node in nodes)
    del node
    nodes.clear()
    assert pulse.alive == 6 * FREE_DEPTH
    del x
    assert pulse.alive == 0


@pytest.mark.parametrize("let_go", ["pause", "part", "restart"])
def test_a_dropped_graph_is_not_held(let_go: str) -> None:
    guard, pulse = DeepGraphGuard(), Pulse()
    x, nodes = chain(2 * FREE_DEPTH - 10, guard, pulse)
    for node in nodes:
        guard.saw(node)
    getattr(guard, let_go)()
    del x, node, nodes
    assert pulse.alive == 0


def test_a_kept_node_in_the_middle_stays_whole() -> None:
    guard, pulse = DeepGraphGuard(), Pulse()
    x, nodes = chain(5 * FREE_DEPTH, guard, pulse)
    for node in nodes:
        guard.saw(node)
    guard.restart()
    middle = nodes[2 * FREE_DEPTH + 7]
    nodes.clear()
    del node, x
    assert pulse.alive == 2 * FREE_DEPTH + 8
    del middle
    assert pulse.alive == 0


def test_a_leaf_that_several_graphs_share_holds_none_of_them() -> None:
    guard, pulse = DeepGraphGuard(), Pulse()
    weight = torch.ones(1, requires_grad=True)
    leaf = torch.autograd.graph.get_gradient_edge(weight).node
    for _ in range(3):
        x = weight
        for _ in range(FREE_DEPTH // 2):
            x = x * 1.0
            pulse.feel(x)
            guard.saw(x.grad_fn)
            guard.saw(leaf)
        guard.part()
    guard.restart()
    assert not is_anchored(leaf)
    del x
    assert pulse.alive == 0
