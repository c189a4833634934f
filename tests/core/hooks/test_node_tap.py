"""The tap is called before every node that the engine runs, once, and is gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.engine import current_node
from retrograd.core.hooks.node_tap import NodeTap, NodeTaps
from retrograd.core.hooks.nodes import IDENTITIES_LAST, name_of
from retrograd.core.hooks.reach import PassNodes
from tests.following.graph.test_walker import Double, tangle


class Tapper:
    """Taps every pass."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []
        self.runs: list[EngineRun] = []
        self._all = NodeTaps()
        self._taps: list[NodeTap] = []

    def run_begins(self, run: EngineRun) -> None:
        self.runs.append(run)
        self._taps.append(self._all.tap(PassNodes(run), lambda one: self.note((one,)), self.note))

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        self._all.end(self._taps.pop())

    def note(self, incoming: tuple[Tensor | None, ...]) -> None:
        self.seen.append((current_node(), incoming))

    @property
    def nodes(self) -> list[Any]:
        return [node for node, _ in self.seen]


@contextmanager
def tapping() -> Iterator[Tapper]:
    tapper = Tapper()
    backward_followers.add(tapper)
    try:
        yield tapper
    finally:
        backward_followers.remove(tapper)


def all_nodes(root: Tensor) -> list[Any]:
    found = [root.grad_fn]
    for node in found:
        found.extend(each for each, _ in node.next_functions if each is not None and each not in found)
    return found


@contextmanager
def hooked(root: Tensor) -> Iterator[list[tuple[Any, Any]]]:
    """The oracle: torch's own hooks on all nodes."""
    seen: list[tuple[Any, Any]] = []
    handles = [
        node.register_prehook(lambda incoming: seen.append((current_node(), incoming))) for node in all_nodes(root)
    ]
    yield seen
    for handle in handles:
        handle.remove()


def same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 30))
def test_as_torchs_own_hooks(seed: int, size: int) -> None:
    loss = tangle(seed, size)
    with hooked(loss) as expected, tapping() as tapper:
        loss.backward(retain_graph=True)
    assert tapper.nodes == [node for node, _ in expected]
    for (_, ours), (_, theirs) in zip(tapper.seen, expected, strict=True):
        assert all(map(same, ours, theirs))  # where several are taken and the first alone is of use, we see it alone


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 30), data=st.data())
def test_only_what_runs_for_certain_inputs(seed: int, size: int, data: Any) -> None:
    loss = tangle(seed, size)
    nodes = all_nodes(loss)
    asked = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True))
    edges = [torch.autograd.graph.GradientEdge(node, 0) for node in asked]
    with hooked(loss) as expected, tapping() as tapper:
        torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
    assert tapper.nodes == [node for node, _ in expected]


def test_all_gradients_of_a_node_that_takes_several() -> None:
    a, b, _ = torch.arange(6.0, requires_grad=True).reshape(3, 2).unbind()
    with tapping() as tapper:
        (a + 2 * b).sum().backward()
    (incoming,) = [incoming for node, incoming in tapper.seen if node.name() == "UnbindBackward0"]
    assert [each if each is None else each.tolist() for each in incoming] == [[1, 1], [2, 2], None]


def test_python_functions_and_in_place_changes() -> None:
    x = torch.ones(4, requires_grad=True)
    base = x.clone()
    base[:2] *= 3
    loss = Double.apply(base).sum()
    with hooked(loss) as expected, tapping() as tapper:
        loss.backward()
    assert tapper.nodes == [node for node, _ in expected]
    assert {"CopySlices", "DoubleBackward"} <= {name_of(node) for node in tapper.nodes}


def test_hooks_of_the_program_come_first_and_count() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    y.register_hook(lambda gradient: gradient * 5)
    with tapping() as tapper:
        y.sum().backward()
    (incoming,) = [incoming for node, incoming in tapper.seen if node is y.grad_fn]
    assert incoming[0].tolist() == [5, 5]
    assert x.grad is not None
    assert x.grad.tolist() == [15, 15]


def test_a_leaf_still_gets_the_gradient_itself() -> None:
    """Who keeps what comes in to a leaf's node makes torch copy it."""
    x = torch.ones(2, requires_grad=True)
    pointers: list[int] = []
    y = x * 3
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda out, _: pointers.append(out[0].data_ptr()))
    follower = Tapper()
    follower.note = lambda incoming: None  # type: ignore[method-assign]
    backward_followers.add(follower)
    try:
        y.backward(torch.ones(2))
    finally:
        backward_followers.remove(follower)
    assert x.grad is not None
    assert [x.grad.data_ptr()] == pointers


def test_a_graph_that_is_run_again_and_again_gets_no_more_hooks() -> None:
    """One that has been set can be emptied, but not taken away."""
    x = torch.ones(3, requires_grad=True)
    outputs = (x.exp() * 2).sin()
    with tapping() as tapper:
        for row in range(3):
            torch.autograd.grad(outputs[row], x, retain_graph=True)
            torch.autograd.grad(outputs.sum(), x, retain_graph=True)
            tapper.seen.clear()
            outputs.sum().backward(retain_graph=True)
            names = [name_of(node) for node in tapper.nodes]
            assert names == ["SumBackward0", "SinBackward0", "MulBackward0", "ExpBackward0", "AccumulateGrad"]
    (memory,) = tapper._all._memories
    calls: list[Any] = []
    memory.table["probe"] = calls.append
    outputs.sum().backward(retain_graph=True)
    memory.table.clear()
    # Each of the three inner nodes once, after nine passes; none where torch does not let us know a node again.
    assert len(calls) == (3 if IDENTITIES_LAST else 0)
    assert not memory.table


def test_a_pass_inside_a_pass_over_a_node_with_several_results() -> None:
    x = torch.ones(2, requires_grad=True)
    parts = x.exp().unbind()
    loss = parts[0] * parts[1]
    inner: list[int] = []

    def run_inside(gradient: Tensor) -> None:
        if not inner:
            inner.append(len(tapper.seen))
            torch.autograd.grad(loss, x, retain_graph=True)
            inner.append(len(tapper.seen))

    parts[0].register_hook(run_inside)
    with tapping() as tapper:
        (loss * 1).backward(retain_graph=True)
    assert [name_of(node) for node in tapper.nodes][inner[0] : inner[1]] == ["MulBackward0", "ExpBackward0"]


def test_a_pass_inside_a_pass_over_the_same_nodes() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    loss = y.sum()
    inner: list[int] = []

    def run_inside(gradient: Tensor) -> None:
        if not inner:
            inner.append(len(tapper.seen))
            torch.autograd.grad(loss, x, retain_graph=True)
            inner.append(len(tapper.seen))

    z = loss * 1
    loss.register_hook(run_inside)
    with tapping() as tapper:
        z.backward(retain_graph=True)
    names = [name_of(node) for node in tapper.nodes]
    assert names[inner[0] : inner[1]] == ["ExpBackward0"]  # the sum's own hooks are being called meanwhile
    assert names[: inner[0]] + names[inner[1] :] == ["MulBackward0", "SumBackward0", "ExpBackward0", "AccumulateGrad"]
