"""Small parts of the recorder by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from retrograd.hooks.calls import count_calls, count_steps
from retrograd.hooks.nested import flatten
from retrograd.progress.steps import UpdatesByHand

# ---- nests ----------------------------------------------------------------------------------------------------

keys = st.text(alphabet="ab.", max_size=2)
leaves = st.one_of(st.none(), st.integers(), st.text(max_size=2), st.builds(lambda: torch.ones(1)))


def nest(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    lists = st.lists(inner, max_size=3)
    return st.one_of(lists, lists.map(tuple), st.dictionaries(keys, inner, max_size=3))


nests = st.recursive(leaves, nest, max_leaves=12)


def look_up(nest: object, path: tuple[str, ...]) -> object:
    for key in path:
        nest = nest[key] if isinstance(nest, dict) else nest[int(key)]  # type: ignore[index]
    return nest


def count_tensors(nest: object) -> int:
    if isinstance(nest, torch.Tensor):
        return 1
    items = nest.values() if isinstance(nest, dict) else nest if isinstance(nest, (list, tuple)) else ()
    return sum(map(count_tensors, items))


@given(nests)
def test_every_tensor_of_a_nest_is_found_under_its_keys(value: object) -> None:
    found = list(flatten(value, ("output",)))
    assert len(found) == count_tensors(value)
    for (slot, *path), tensor in found:
        assert slot == "output"
        assert look_up(value, tuple(path)) is tensor


# ---- updates by hand ------------------------------------------------------------------------------------------


def touch_nothing(net: nn.Linear) -> None:
    pass


def subtract(net: nn.Linear) -> None:
    with torch.no_grad():
        net.weight.sub_(0.1)


def subtract_past_autograd(net: nn.Linear) -> None:
    net.weight.data.sub_(0.1)


def zero(net: nn.Linear) -> None:
    net.zero_grad(set_to_none=False)


def drop(net: nn.Linear) -> None:
    net.zero_grad()


def replace(net: nn.Linear) -> None:
    net.weight.grad = torch.ones_like(net.weight)


def assign(net: nn.Linear) -> None:
    net.weight.data = net.weight.data - 0.1


@pytest.mark.parametrize("act", [touch_nothing, subtract, subtract_past_autograd, zero, drop, replace, assign])
@pytest.mark.parametrize("keeps_gradients", [True, False])
def test_whether_parameters_were_touched(act: Callable[[nn.Linear], None], keeps_gradients: bool) -> None:
    net = nn.Linear(70, 40)
    manual = UpdatesByHand(net.parameters())
    if keeps_gradients:
        net(torch.ones(1, 70)).sum().backward()
    manual.remember()
    act(net)
    unseen = not keeps_gradients and act in (zero, drop)
    assert manual.touched() == (act is not touch_nothing and not unseen)
    manual.remember()
    assert not manual.touched()


def test_nothing_is_touched_before_the_first_backward() -> None:
    net = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    manual = UpdatesByHand(())
    manual.add(net.parameters())
    assert not manual.touched()
    manual.remember()
    assert not manual.touched()


# ---- the stack ------------------------------------------------------------------------------------------------


def test_calls_are_counted_on_the_stack() -> None:
    counts = []

    class Tree(nn.Module):
        def forward(self, depth: int) -> None:
            counts.append(count_calls(self))
            if depth:
                self(depth - 1)

    tree, other = Tree(), Tree()
    tree.register_forward_pre_hook(lambda module, args: None)
    tree(2)
    assert counts == [1, 2, 3]
    assert count_calls(other) == 0


def test_steps_of_optimizers_are_counted_on_the_stack() -> None:
    counts = []

    class Twice(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            counts.append(count_steps(self))
            super().step()

    parameter = nn.Parameter(torch.ones(1))
    torch.optim.SGD([parameter])
    optimizer = Twice([parameter])
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: counts.append(count_steps(optimizer)))
    optimizer.step()
    assert counts == [1, 2, 1]
    assert count_steps(optimizer) == 0
