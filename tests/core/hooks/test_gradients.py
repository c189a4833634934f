"""A gradient watch sees what ``Tensor.register_hook`` sees, in the same order, and keeps nothing."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrograd.core.hooks.gradients import GradientWatch
from retrograd.core.hooks.reach import DeepGraphGuard


class Log:
    """Two ways to hook a tensor that write down what they see."""

    def __init__(self, *, ours: bool) -> None:
        self.ours = ours
        self.seen: list[tuple[str, Tensor]] = []
        self.handles: list[Any] = []
        self.watches: list[GradientWatch] = []

    def hook(self, name: str, tensor: Tensor) -> None:
        see = self.writer(name)
        if self.ours:
            watch = GradientWatch(see, DeepGraphGuard(), self.handles)
            self.watches.append(watch)
            watch.watch(tensor)
        else:
            self.handles.append(tensor.register_hook(see))

    def writer(self, name: str) -> Callable[[Tensor], None]:
        def see(gradient: Tensor | None) -> None:
            self.seen.append((name, torch.zeros(0) if gradient is None else gradient.clone()))

        return see


def same(ours: Log, theirs: Log) -> bool:
    return [name for name, _ in ours.seen] == [name for name, _ in theirs.seen] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(ours.seen, theirs.seen, strict=True)
    )


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hook", "user hook", "retain", "mul_", "slice", "write view", "chunk", "new", "use"]),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=14,
)


def play(steps: list[tuple[str, int]], *, ours: bool) -> tuple[Log, list[Tensor]]:
    """Carry out a program on a pool of tensors that may share memory."""
    log = Log(ours=ours)
    leaf = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3).requires_grad_()
    pool = [leaf * 2.0]
    total = torch.zeros((), dtype=torch.float64)
    retained: list[Tensor] = []
    for number, (step, index) in enumerate(steps):
        tensor = pool[index % len(pool)]
        try:
            _ = tensor.grad_fn  # else torch itself crashes in register_hook on a view whose base was changed in place
            if step == "hook":
                log.hook(f"hook {number}", tensor)
            elif step == "user hook":
                tensor.register_hook(log.writer(f"user {number}"))
            elif step == "retain":
                tensor.retain_grad()
                retained.append(tensor)
            elif step == "mul_":
                tensor.mul_(1.5)
            elif step == "slice":
                pool.append(tensor[..., :2])
            elif step == "write view":
                tensor[..., 0] = tensor[..., 1].detach() + 1.0
            elif step == "chunk":
                pool += tensor.chunk(2)
            elif step == "new":
                pool.append(tensor * 3.0)
            else:
                total = total + (tensor * (number + 1.0)).sum()
        except RuntimeError as error:  # multi-output views may not be changed in place
            log.seen.append((type(error).__name__, torch.zeros(1)))
    (total + pool[0].sum()).backward()
    return log, [leaf, *retained]


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_programs_of_hooks_and_in_place_writes(steps: list[tuple[str, int]]) -> None:
    ours, our_tensors = play(steps, ours=True)
    theirs, their_tensors = play(steps, ours=False)
    assert same(ours, theirs), (ours.seen, theirs.seen)
    for one, other in zip(our_tensors, their_tensors, strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def watch(tensor: Tensor, see: Callable[[Tensor], None]) -> GradientWatch:
    made = GradientWatch(see, DeepGraphGuard(), [])
    made.watch(tensor)
    return made


def test_it_sees_what_earlier_hooks_made_of_the_gradient() -> None:
    seen: list[Tensor] = []
    x = torch.ones(2, requires_grad=True) * 2
    x.register_hook(lambda g: g * 10)
    watch(x, seen.append)
    x.register_hook(lambda g: g * 100)
    x.sum().backward()
    assert seen[0].tolist() == [10, 10]


def test_removal_takes_ours_and_leaves_theirs() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True) * 2
    handle = x.register_hook(lambda g: order.append("theirs"))
    ours = watch(x, lambda g: order.append("ours"))
    ours.remove()
    ours.remove()
    x.sum().backward(retain_graph=True)
    assert order == ["theirs"]
    handle.remove()
    x.sum().backward()
    assert order == ["theirs"]


def test_a_user_may_remove_theirs_and_ours_stays() -> None:
    seen: list[Tensor] = []
    x = torch.ones(2, requires_grad=True) * 2
    watch(x, seen.append)
    x.register_hook(lambda g: None).remove()
    x.sum().backward()
    assert len(seen) == 1


def test_removal_after_an_in_place_change() -> None:
    seen: list[Tensor] = []
    x = torch.ones(2, requires_grad=True) * 2
    ours = watch(x, seen.append)
    x.mul_(3.0)
    ours.remove()
    x.sum().backward()
    assert not seen


def test_a_leaf_gives_a_handle_to_its_owner() -> None:
    seen: list[Tensor] = []
    handles: list[Any] = []
    leaf = torch.ones(2, requires_grad=True)
    GradientWatch(seen.append, DeepGraphGuard(), handles).watch(leaf)
    leaf.sum().backward()
    assert len(seen) == len(handles) == 1
    handles[0].remove()
    leaf.sum().backward()
    assert len(seen) == 1
    assert not leaf._backward_hooks


@pytest.mark.parametrize("leaf", [True, False])
def test_a_hooked_tensor_is_saved_without_a_word(leaf: bool) -> None:
    class Place:
        def see(self, gradient: Tensor) -> None:
            pass

        see.__torch_unserializable__ = True  # type: ignore[attr-defined]

    x = torch.ones(2, requires_grad=True)
    y = x if leaf else x * 2
    watch(y, Place().see)
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    assert torch.equal(torch.load(file), y)
