"""One node run alone gives what it gives in the engine, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import NoGraphError, ReplayError
from retrograd.core.hooks.nodes import is_leaf, root_edges, variable_of
from retrograd.core.hooks.reach import find_nodes
from retrograd.following.engine.one_node import rerun
from tests.by_hand import passing
from tests.following.graph.bits import all_same, same
from tests.following.graph.zoo import ZOO, AsksForNone, Rounds, Scale, leaf

Gradients = tuple[Tensor | None, ...]


def watch(roots: list[Tensor]) -> dict[Any, tuple[Gradients, Gradients]]:
    """Node → what came in, and what the engine passed on."""
    nodes = find_nodes(root_edges(roots)).nodes
    came: dict[Any, Gradients] = {}
    passed: dict[Any, tuple[Gradients, Gradients]] = {}

    def hook(node: Any) -> Iterator[Any]:
        yield node.register_prehook(lambda incoming: came.__setitem__(node, tuple(incoming)))
        yield node.register_hook(lambda outgoing, _: passed.__setitem__(node, (came[node], tuple(outgoing))))

    handles = [handle for node in nodes if not is_leaf(node) for handle in hook(node)]
    torch.autograd.backward(roots, [torch.full_like(root, 0.7) for root in roots], retain_graph=True)
    for handle in handles:
        handle.remove()
    return passed


def wanted(node: Any, outgoing: Gradients) -> list[Tensor | None]:
    """Those gradients that go somewhere."""
    return [each for each, (following, _) in zip(outgoing, node.next_functions, strict=True) if following is not None]


@pytest.mark.parametrize("name", ZOO)
def test_every_node_gives_what_the_engine_passed_on(name: str) -> None:
    roots, leaves = ZOO[name]()
    passed = watch(roots)
    before = [each.grad for each in leaves]
    values = [None if each is None else each.clone() for each in before]
    for node, (incoming, outgoing) in reversed(passed.items()):
        for found in (rerun(node, incoming), rerun(node, list(incoming))):
            assert all_same(wanted(node, outgoing), wanted(node, found))
            assert len(found) == len(outgoing)
    assert all(one is other.grad for one, other in zip(before, leaves, strict=True))
    assert all_same(before, values)


def test_gradients_may_be_given_bare() -> None:
    """One of a tensor goes to the tensor's own place; those of a node are as many as it takes."""
    x = leaf(3)
    y = x.exp()
    for given in (torch.ones(3), (torch.ones(3),)):
        assert same(rerun(y, given)[0], y.detach())
        assert same(rerun(y.grad_fn, given)[0], y.detach())
    w = leaf(4, 4)
    node: Any = w.unbind()[0].grad_fn
    (found,) = rerun(w.unbind()[1], torch.ones(4))
    assert found is not None
    assert found.tolist() == [[0] * 4, [1] * 4, [0] * 4, [0] * 4]
    gradients = [torch.randn(4), None, torch.randn(4), torch.randn(4)]
    expected = torch.stack([torch.zeros(4) if each is None else each for each in gradients])
    for way in (rerun(node, *gradients), rerun(node, gradients)):  # type: ignore[arg-type]
        assert same(way[0], expected)
    with pytest.raises(ReplayError, match="takes 4 gradients, not 1"):
        rerun(node, torch.ones(4))
    with pytest.raises(ReplayError):
        rerun(node, gradients, None)
    with pytest.raises(ReplayError, match="takes 1 gradients, not 0"):
        rerun(y.grad_fn)


def test_gradients_are_reduced_and_cast_unless_the_raw_ones_are_asked_for() -> None:
    x, y = leaf(3, 1), leaf(4, dtype=torch.float64)
    z = x * y
    reduced = rerun(z, torch.ones(3, 4, dtype=torch.float64))
    assert reduced[0] is not None
    assert (reduced[0].dtype, reduced[0].shape) == (torch.float32, (3, 1))
    node = (leaf(3) + leaf(2, 3).double()).grad_fn
    assert [list(each.shape) for each in rerun(node, torch.ones(2, 3).double(), raw=True) if each is not None] == [
        [2, 3],
        [2, 3],
    ]


def test_a_leaf_gives_what_it_would_add() -> None:
    x = leaf(3)
    ran: list[Tensor] = []
    x.register_post_accumulate_grad_hook(ran.append)
    given = torch.ones(3)
    assert rerun(x, given)[0] is given
    (node,) = [following for following, _ in x.exp().grad_fn.next_functions]
    assert variable_of(node) is x
    assert rerun(node, None) == (None,)
    assert x.grad is None
    assert ran == []


@pytest.mark.parametrize("raises", [False, True])
def test_a_checkpoint_leaves_grad_as_it_is(raises: bool) -> None:
    inner, x = nn.Linear(3, 3), leaf(2, 3)
    inner.weight.grad = before = torch.ones(3, 3)

    def forward(x: Tensor) -> Tensor:
        y = inner(x)
        if raises and torch.is_grad_enabled():
            y.sum().backward(retain_graph=True)
            raise ArithmeticError("no")
        return y

    y = checkpoint(forward, x, use_reentrant=True)
    if raises:
        with pytest.raises(ArithmeticError):
            rerun(y, torch.ones(2, 3))
    else:
        expected = torch.autograd.grad(inner(x), x, torch.ones(2, 3))
        assert all_same(rerun(y, torch.ones(2, 3))[-1:], expected)
    assert inner.weight.grad is before
    assert before.tolist() == torch.ones(3, 3).tolist()
    assert inner.bias.grad is None
    assert x.grad is None


def test_a_run_is_recorded_where_that_is_asked() -> None:
    x = leaf(3)
    (plain,) = rerun(x.exp(), torch.ones(3))
    (recorded,) = rerun(x.exp(), torch.ones(3), create_graph=True)
    assert plain is not None
    assert recorded is not None
    assert (plain.requires_grad, recorded.requires_grad) == (False, True)
    assert same(torch.autograd.grad(recorded.sum(), x)[0], x.exp().detach())


def test_undefined_gradients_of_python_functions() -> None:
    x, y = leaf(3), leaf(3)
    first, _ = Scale.apply("a", x, 2.0, y)
    assert all_same(rerun(first, torch.ones(3)), (torch.full((3,), 2.0), torch.ones(3)))
    _, second = AsksForNone.apply(x)
    assert rerun(second, torch.ones(3)) == (None,)
    _, whole = Rounds.apply(x)
    assert not whole.requires_grad


def test_an_error_in_a_node_is_its_own_and_carries_a_note() -> None:
    def fail(gradient: Tensor) -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone") as caught:
        rerun(passing(fail, "Breaks")(leaf(2, 3)), torch.ones(2, 3))
    (said,) = caught.value.__notes__
    assert "BreaksBackward (number" in said
    assert "float32[2, 3]" in said


def test_what_does_not_fit_is_refused() -> None:
    y = leaf(3, 2).exp()
    with pytest.raises(NoGraphError):
        rerun(torch.ones(3), torch.ones(3))
    with pytest.raises(ReplayError, match=r"must be float32\[3, 2\], and is float32\[2\]"):
        rerun(y, torch.ones(2))
    with pytest.raises(ReplayError, match=r"must be float32\[3, 2\], and is float64\[3, 2\]"):
        rerun(y, torch.ones(3, 2).double())
    with pytest.raises(ReplayError, match="on meta"):
        rerun(y, torch.ones(3, 2, device="meta"))
    with pytest.raises(ReplayError, match="and is float"):
        rerun(y, [1.0])  # type: ignore[list-item]
    with pytest.raises(ReplayError, match="takes 1 gradients, not 0"):
        rerun(y, ())
