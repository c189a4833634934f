"""The compiled code and its twins in Python find, write and note the same."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import retrograd as rg
from retrograd.core.hooks import forward_log
from retrograd.core.hooks.native import native
from retrograd.core.hooks.nodes import LEAF_NUMBER, is_leaf, number_of, root_edges
from retrograd.core.hooks.reach import find_nodes, follow, order_upwards
from tests.following.graph.test_walker import tangle, tangle_of_threads

pytestmark = pytest.mark.skipif(native is None, reason="installed without a compiler")


def both(monkeypatch: pytest.MonkeyPatch, *rooms: Any) -> list[Callable[[], None]]:
    """Switches: to the compiled code, and to Python."""
    return [lambda code=code: [monkeypatch.setattr(room, "native", code) for room in rooms] for code in (native, None)]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 30), most=st.sampled_from([1, 7, float("inf")]))
def test_nodes_are_found_alike(seed: int, size: int, most: float) -> None:
    assert native is not None
    for roots in ([tangle(seed, size)], tangle_of_threads(seed, size)):
        nodes = list(dict.fromkeys(node for node, _ in root_edges(roots)))
        found = []
        for code in (native.follow, follow):
            grown, several = list(nodes), set[Any]()
            links = array("q", code(grown, several, most))
            found.append((grown, several, links, native.order_upwards(grown, links, LEAF_NUMBER)))
            assert found[-1][-1] == order_upwards(grown, links, LEAF_NUMBER)
        assert found[0] == found[1]
        assert array("Q", native.number_nodes(found[0][0])).tolist() == list(map(number_of, found[0][0]))


def test_what_is_no_node_is_an_error_and_no_crash() -> None:
    assert native is not None
    with pytest.raises(AttributeError):
        native.follow([1], set(), 9.0)
    with pytest.raises(TypeError):
        native.follow((), set(), 9.0)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        native.order_upwards([1], array("q", [-2]), LEAF_NUMBER)
    with pytest.raises(TypeError):
        native.number_nodes(1)  # type: ignore[arg-type]
    reached = find_nodes(root_edges(tangle(1, 5)))
    with pytest.raises(ValueError, match="twice"):
        native.follow([reached.nodes[0]] * 2, set(), 9.0)
    assert native.order_upwards(reached.nodes, array("q", [*reached.links, 10**6]), LEAF_NUMBER) is not None
    assert native.order_upwards(reached.nodes, array("q", [10**6]), LEAF_NUMBER) is None


def train_oddly(x: Tensor) -> Tensor:
    """Containers, writes, options, memory given to NumPy, inference, an error, more tensors than are counted."""
    y = torch.cat([x.sin(), x.exp()]).reshape(2, -1)[0, :] + torch.stack([x] * 30).sum(dim=0)
    y = torch.dropout(y, p=0.0, train=True).clone()
    y.mul_(2.0).add_(x, alpha=0.5)
    y.detach().numpy()[:] += 1.0
    with torch.inference_mode():
        torch.ones(3) + 1
    with pytest.raises(RuntimeError):
        x @ torch.ones(7)
    return torch.nn.functional.softplus(y).sum() + torch.nn.functional.cross_entropy(y[None], torch.tensor([1]))


def test_operations_are_noted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    found, hastened = [], []
    for switch in both(monkeypatch, forward_log):
        switch()
        x = torch.linspace(0.1, 1.0, 3).requires_grad_()
        first = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        with rg.record_origins(writes=True) as origins:
            hastened.append("__torch_function__" in vars(origins._log._mode))
            loss = train_oddly(x)
        hastened.append("__torch_function__" in vars(origins._log._mode))
        nodes = sorted(find_nodes(root_edges(loss)).nodes, key=number_of)
        assert origins.writes is not None
        writes = [(each.writer, each.line, each.version, each.order) for each in origins.writes.writes]
        given = [(each.writer, each.line) for each in origins.writes._arrays]
        places = [(number_of(each) - first, origins.find(number_of(each))) for each in nodes if not is_leaf(each)]
        found.append((loss.item(), places, writes, given))
    assert hastened == [True, False, False, False]
    assert found[0] == found[1]
    assert len(found[0][1]) > 10
    assert len(found[0][2]) == 2


def test_a_fault_of_ours_is_told_once_and_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, requires_grad=True)
    origins = rg.record_origins()
    with origins:
        x.sin()
        monkeypatch.setattr(origins._log._logs.here.log, "operations", None)
        with pytest.warns(UserWarning, match="not noted any more"):
            y = x.cos()
        y = y.exp()
    assert torch.equal(y, torch.ones(3).cos().exp())
