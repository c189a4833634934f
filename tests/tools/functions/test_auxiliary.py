"""What carries data and no gradient is declared, and nobody has to make a gradient up for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from retrograd.core.errors import FunctionError
from retrograd.tools.functions.call import Auxiliary
from retrograd.tools.functions.function import Function
from tests.tools.functions.linear import tensors


class MaskedScale(Function):
    auxiliary = ("mask",)

    def forward(self, ctx: Any, x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, mask, weight)
        self.needs = dict(ctx.needs_grad)
        return x * mask * weight

    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
        x, mask, weight = ctx.saved_tensors
        return {"x": grad_output * mask * weight, "weight": grad_output * mask * x}


class MaxPool(Function):
    """Windows of two; the places of the maxima and a name come out beside the values."""

    def forward(self, ctx: Any, x: Tensor) -> tuple[Any, ...]:
        values, places = x.unflatten(-1, (-1, 2)).max(-1)
        ctx.save_for_backward(places)
        weights = values.detach() * 2
        return Auxiliary(places), values, Auxiliary(weights), Auxiliary("max"), 3 * values

    def backward(self, ctx: Any, of_values: Tensor, of_triple: Tensor) -> dict[str, Tensor]:
        (places,) = ctx.saved_tensors
        return {"x": ((of_values + 3 * of_triple).unsqueeze(-1) * F.one_hot(places, 2)).flatten(-2)}


def test_an_auxiliary_input_has_no_gradient_whatever_it_requires() -> None:
    function = MaskedScale()
    x, weight = (tensors()[0].detach().clone().requires_grad_() for _ in range(2))
    mask = torch.rand_like(x).requires_grad_()
    function(x, mask, weight).sum().backward()
    assert function.needs == {"x": True, "mask": False, "weight": True}
    assert mask.grad is None
    assert torch.equal(x.grad, mask * weight)  # type: ignore[arg-type]
    assert not function(x.detach(), mask, weight.detach()).requires_grad
    assert gradcheck(lambda i, w: function(i, mask, w), (x, weight))


def test_a_gradient_for_an_auxiliary_input_is_refused() -> None:
    class Faked(MaskedScale):
        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
            return {**super().backward(ctx, grad_output), "mask": torch.zeros_like(grad_output)}

    x = tensors()[0]
    with pytest.raises(FunctionError, match="gradient for 'mask', which is not a tensor or is auxiliary"):
        Faked()(x, torch.ones_like(x), x).sum().backward()


def test_a_container_of_auxiliary_tensors_is_taken() -> None:
    class Scaled(Function):
        auxiliary = ("factors", "others")

        def forward(self, ctx: Any, x: Tensor, factors: list[Tensor], *others: Tensor) -> Tensor:
            ctx.factors = [factor.detach() for factor in factors]
            self.needs = dict(ctx.needs_grad)
            return x * sum(ctx.factors) + sum(others)

        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
            return {"x": grad_output * sum(ctx.factors)}

    x, factor = tensors()[0], torch.full((4, 3), 2.0, dtype=torch.float64, requires_grad=True)
    scaled = Scaled()
    assert gradcheck(lambda x: scaled(x, [factor, factor], factor), (x,))
    assert scaled.needs == {"x": True, "factors": False, "others[0]": False}
    assert not scaled(x.detach(), [factor], factor).requires_grad


def test_auxiliary_outputs_come_out_as_they_are_and_have_no_slot_in_backward() -> None:
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    places, values, weights, name, triple = MaxPool()(x)
    expected, indices = F.max_pool1d(x, 2, return_indices=True)
    assert torch.equal(values, expected)
    assert torch.equal(places, indices % 2)
    assert name == "max"
    assert (values.requires_grad, triple.requires_grad) == (True, True)
    assert not places.requires_grad
    assert not weights.requires_grad  # a float, and still none
    assert weights.grad_fn is None
    assert gradcheck(lambda x: MaxPool()(x)[1::3], (x,))
    assert gradgradcheck(lambda x: MaxPool()(x)[1::3], (x,))


def test_marks_of_torch_and_ours_go_together() -> None:
    class Both(Function):
        def forward(self, ctx: Any, x: Tensor) -> tuple[Any, ...]:
            marked, wrapped = x * 2, x * 3
            ctx.mark_non_differentiable(marked)
            return x * 4, marked, Auxiliary(wrapped)

        def backward(self, ctx: Any, grad_output: Tensor, of_marked: Tensor) -> Tensor:
            assert torch.equal(of_marked, torch.zeros_like(grad_output))
            return 4 * grad_output

    x = tensors()[0]
    out, marked, wrapped = Both()(x)
    assert [each.requires_grad for each in (out, marked, wrapped)] == [True, False, False]
    out.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 4))  # type: ignore[arg-type]


def test_an_argument_that_is_handed_on_as_auxiliary_stays_what_it_was() -> None:
    class HandsOn(Function):
        def forward(self, ctx: Any, x: Tensor) -> tuple[Any, ...]:
            return x * 2, Auxiliary(x)

        def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
            return 2 * grad_output

    x = tensors()[0]
    _, same = HandsOn()(x)
    assert torch.equal(same, x)
    assert not same.requires_grad
    assert x.requires_grad


def test_nothing_but_auxiliary_outputs() -> None:
    class Counts(Function):
        def forward(self, ctx: Any, x: Tensor) -> Auxiliary:
            return Auxiliary(x.numel())

    assert Counts()(tensors()[0]) == 12
    assert repr(Auxiliary(3)) == "Auxiliary(3)"
