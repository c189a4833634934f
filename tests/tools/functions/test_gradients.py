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


COUNT = "expected 3, one for each of x, weight, factor"
MISFITS: list[tuple[Any, str]] = [
    ({"x": torch.ones(4, 3), "wieght": torch.ones(2, 3)}, "a gradient for 'wieght', which forward does not take."),
    ({"x": torch.ones(4, 3), "wieght": None}, "a gradient for 'wieght', which forward does not take."),
    ({"factor": torch.ones(())}, "gradient for 'factor', which is not a tensor"),
    ((None, None, torch.ones(())), "gradient for 'factor', which is not a tensor"),
    ({"x": "much"}, "returned 'much' as the gradient of 'x'; expected a tensor of shape [4, 3]"),
    ((None, 1.0, None), "returned 1.0 as the gradient of 'weight'"),
    ((None, None), f"returned 2 gradients; {COUNT}"),
    ((None,), f"returned 1 gradients; {COUNT}"),
    (None, f"returned 1 gradients; {COUNT}"),
    ((None, None, None, torch.ones(1)), f"returned 4 gradients; {COUNT}"),
    *(
        (gradients, f"returned a gradient of shape {list(shape)} for 'weight'; expected [2, 3]")
        for shape in ((3, 2), (2,), (2, 3, 1), (1, 3), ())
        for gradients in ({"weight": torch.ones(shape)}, (None, torch.ones(shape), None))
    ),
]


@pytest.mark.parametrize(("gradients", "text"), MISFITS)
def test_what_does_not_fit(gradients: Any, text: str) -> None:
    with pytest.raises(FunctionError) as raised:
        run(gradients)
    assert "backward of Returns returned" in str(raised.value)
    assert text in str(raised.value)


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
