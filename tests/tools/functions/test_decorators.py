"""Torch's decorators for forward and backward do on methods what they do on static methods."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from retrograd.core.errors import FunctionError
from retrograd.tools.functions.function import Function
from tests.tools.functions.linear import MyLinear, tensors

Seen = list[tuple[torch.dtype, bool]]


class Ours(Function):
    def __init__(self) -> None:
        self.seen: Seen = []

    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(self, ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @custom_bwd(device_type="cpu")
    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
        x, weight = ctx.saved_tensors
        gradients = {"x": grad_output @ weight, "weight": grad_output.T @ x}
        self.seen.append((gradients["x"].dtype, torch.is_autocast_enabled("cpu")))
        return gradients


class OursInAutocast(Ours):
    @custom_fwd(device_type="cpu")
    def forward(self, ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        ctx.save_for_backward(x, weight)
        return x @ weight.T


def make_plain(seen: Seen, cast_inputs: torch.dtype | None) -> type[torch.autograd.Function]:
    class Plain(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
            ctx.save_for_backward(x, weight)
            return x @ weight.T

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            of_input = grad_output @ weight
            seen.append((of_input.dtype, torch.is_autocast_enabled("cpu")))
            return of_input, grad_output.T @ x

    return Plain


@pytest.mark.parametrize(("ours", "cast"), [(Ours, torch.float32), (OursInAutocast, None)])
def test_amp_is_that_of_a_plain_function_call_by_call(ours: type[Ours], cast: torch.dtype | None) -> None:
    seen: Seen = []
    function, plain = ours(), make_plain(seen, cast)
    got = []
    for call in (function, plain.apply):
        x, weight, _ = tensors(dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = call(x.bfloat16(), weight)
        outside = call(x, weight)  # before the other's backward: each call has a state of its own
        inside.float().sum().backward()
        outside.sum().backward()
        got.append((inside, outside, x.grad, weight.grad))
    assert function.seen == seen
    for mine, theirs in zip(*got, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype is theirs.dtype


def test_once_differentiable_with_gradients_by_name() -> None:
    class Once(MyLinear):
        @once_differentiable
        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
            assert not torch.is_grad_enabled()
            return super().backward(ctx, grad_output)

    x, weight, bias = tensors()
    incoming = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(Once()(x, weight, bias), x, incoming, create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        gradient.sum().backward()
    assert torch.autograd.gradcheck(Once(), (x, weight, bias))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_of_them_in_either_order(order: tuple[int, int]) -> None:
    both = [once_differentiable, custom_bwd(device_type="cpu")]

    def backward(self: Any, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
        return MyLinear.backward(self, ctx, grad_output)

    class Twice(MyLinear):
        @custom_fwd(device_type="cpu")
        def forward(self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().forward(ctx, x, weight, bias)

    Twice.backward = both[order[0]](both[order[1]](backward))

    class Final(Twice):
        """Made after its base is complete."""

    x, weight, _ = tensors(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = Final()(x, weight)
    torch.autograd.grad(output.float().sum(), x, create_graph=True)


def test_a_decorator_of_the_users_own_goes_below_torchs() -> None:
    def counted(method: Any) -> Any:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            return method(self, *args)

        return wrapper

    class Below(MyLinear):
        @once_differentiable
        @counted
        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
            return super().backward(ctx, grad_output)

    below = Below()
    below(*tensors()).sum().backward()
    assert below.calls == 1
    with pytest.raises(FunctionError, match=r"Above.backward has another decorator around one of torch"):

        class Above(MyLinear):
            @counted
            @once_differentiable
            def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
                return super().backward(ctx, grad_output)
