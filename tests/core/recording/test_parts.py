"""Small parts of the recorder by themselves."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from retrograd.core.hooks.calls import count_calls, count_steps
from retrograd.core.hooks.nested import flatten

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
