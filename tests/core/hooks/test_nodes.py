"""What nodes have saved, read whatever modes the program is in; and what a node of Python is handed, run alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.core.hooks.nodes import peek, run_python, saved_tensors_of


class Through(TorchDispatchMode):
    """Carries every operation out, as a mode of the program may."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_number_that_was_saved_can_be_read_under_a_dispatch_mode() -> None:
    x = torch.tensor([1.0, 4.0], requires_grad=True)
    with Through():
        y = x / 2
        saved = {name: peek(raw) for name, raw in saved_tensors_of(y.grad_fn)}
        number = saved["other"]
        assert number is not None
        assert number.shape == ()
        assert bool(torch.isfinite(number))  # an operation takes what was read
    assert float(number) == 2.0


def test_what_is_read_shares_memory_and_its_count_of_writes() -> None:
    x, w = torch.ones(3, requires_grad=True), torch.ones(3)
    y = x * w
    (read,) = (peek(raw) for name, raw in saved_tensors_of(y.grad_fn) if name == "other")
    assert read is not None
    assert read.data_ptr() == w.data_ptr()
    w.add_(1)
    assert read._version == w._version


# ---- the node of a Python Function, run alone, is handed what the engine would hand it ----


SEEN: list[tuple[Tensor | None, ...]] = []


class Looks(Function):
    @staticmethod
    def forward(ctx: Any, materialize: bool | None, x: Tensor, y: Tensor, text: str) -> tuple[Tensor, Tensor]:
        if materialize is not None:
            ctx.set_materialize_grads(materialize)
        return x * 1, y.double()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        SEEN.append(incoming)
        first, second = incoming
        return None, first, second, None


@pytest.mark.parametrize("materialize", [None, True, False])
@pytest.mark.parametrize("used", [0, 1])
def test_undefined_gradients_are_zeros_or_none_as_the_function_asked(materialize: bool | None, used: int) -> None:
    SEEN.clear()
    outputs = Looks.apply(materialize, torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True), "")
    gradient = torch.full_like(outputs[used], 2)
    outputs[used].backward(gradient, retain_graph=True)
    given = [None, None]
    given[used] = gradient
    run_python(outputs[0].grad_fn, given)
    theirs, ours = SEEN
    for one, other in zip(theirs, ours, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_there_is_one_gradient_for_each_edge(first: bool, second: bool) -> None:
    x, y = torch.ones(2, requires_grad=first), torch.ones(3, requires_grad=second)
    outputs = Looks.apply(None, x, y, "")
    node = next(each.grad_fn for each in outputs if each.grad_fn is not None)
    given = (torch.ones(2), torch.ones(3).double())
    result = run_python(node, given)
    assert len(result) == len(node.next_functions) == 2
    for wanted, gradient, expected in zip((first, second), result, given, strict=True):
        assert gradient is (expected if wanted else None)
