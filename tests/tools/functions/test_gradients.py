"""Gradients that do not fit their arguments are told in the backward pass, with class, argument, expected and got."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.errors import FunctionError
from retrograd.tools.functions.function import Function
from tests.tools.functions.linear import tensors


class Returns(Function):
    """Gives back what it is told to."""

    def __init__(self, gradients: Any) -> None:
        self.gradients = gradients

    def forward(self, ctx: Any, x: Tensor, weight: Tensor, factor: float = 2.0) -> Tensor:
        return factor * x @ weight.T

    def backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return self.gradients


def run(gradients: Any) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x [4, 3] and weight [2, 3] after a pass that returns these."""
    x, weight, _ = tensors()
    Returns(gradients)(x, weight).sum().backward()
    return x.grad, weight.grad


def said(gradients: Any) -> str:
    with pytest.raises(FunctionError) as raised:
        run(gradients)
    return str(raised.value)


def test_an_unknown_name() -> None:
    text = said({"x": torch.ones(4, 3), "wieght": torch.ones(2, 3)})
    assert "backward of Returns returned a gradient for 'wieght', which forward does not take." in text
    assert "x, weight, factor" in text


def test_a_gradient_for_what_is_no_tensor() -> None:
    assert "gradient for 'factor', which is not a tensor" in said({"factor": torch.ones(())})
    assert "gradient for 'factor', which is not a tensor" in said((None, None, torch.ones(())))


@pytest.mark.parametrize(
    "gradients", [(None, None), (None,), None, (None, None, None, torch.ones(1))], ids=["two", "one", "None", "four"]
)
def test_a_wrong_count(gradients: Any) -> None:
    count = len(gradients) if isinstance(gradients, tuple) else 1
    text = said(gradients)
    assert f"returned {count} gradients; expected 3, one for each of x, weight, factor" in text


@pytest.mark.parametrize("shape", [(3, 2), (2,), (2, 3, 1), (1, 3), ()], ids=str)
def test_a_wrong_shape(shape: tuple[int, ...]) -> None:
    text = said({"weight": torch.ones(shape)})
    assert f"backward of Returns returned a gradient of shape {list(shape)} for 'weight'; expected [2, 3]" in text
    assert f"{list(shape)} for 'weight'; expected [2, 3]" in said((None, torch.ones(shape), None))


def test_what_is_no_gradient() -> None:
    assert "returned 'much' as the gradient of 'x'; expected a tensor of shape [4, 3]" in said({"x": "much"})
    assert "returned 1.0 as the gradient of 'weight'" in said((None, 1.0, None))


def test_a_gradient_that_sums_to_the_argument_is_summed_as_torch_does() -> None:
    of_input, of_weight = run({"x": torch.ones(5, 4, 3), "weight": torch.ones(7, 2, 3)})
    assert of_input is not None
    assert of_weight is not None
    assert torch.equal(of_input, torch.full((4, 3), 5.0, dtype=torch.float64))
    assert torch.equal(of_weight, torch.full((2, 3), 7.0, dtype=torch.float64))
    leaf = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    Returns({"weight": torch.ones(2, 3)})(tensors()[0], leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.full((1, 3), 2.0, dtype=torch.float64))  # type: ignore[arg-type]


def test_a_gradient_nobody_needs_may_be_returned() -> None:
    x, weight, _ = tensors()
    Returns({"x": torch.ones(4, 3), "weight": torch.ones(2, 3)})(x, weight.detach()).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 3, dtype=torch.float64))  # type: ignore[arg-type]


def test_another_dtype_is_cast_as_torch_does() -> None:
    of_input, _ = run({"x": torch.ones(4, 3, dtype=torch.float32)})
    assert of_input is not None
    assert of_input.dtype is torch.float64


def test_nested_tensors_pass() -> None:
    class Double(Function):
        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
            return grad_output * 2

    parts = [torch.randn(n, 3, requires_grad=True) for n in (2, 4)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    torch.cat([part.flatten() for part in Double()(nested).unbind()]).sum().backward()
    for part in parts:
        assert torch.equal(part.grad, torch.full_like(part, 2))  # type: ignore[arg-type]


def test_a_parameter_as_argument_is_none_of_ours() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    Returns({"weight": torch.full((2, 3), 5.0)})(torch.ones(4, 3), weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 3), 5.0))  # type: ignore[arg-type]
