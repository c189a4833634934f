"""Forward mode and torch.func, against plain torch operations in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

from retrograd.core.errors import FunctionError
from retrograd.tools.functions.call import Auxiliary
from retrograd.tools.functions.function import Function
from tests.tools.functions.linear import MyLinear, tensors


class FuncLinear(Function):
    """All that torch.func asks for."""

    generate_vmap_rule = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _ = inputs
        assert tuple(ctx.needs_grad) == ("x", "weight", "bias")
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
        x, weight = ctx.saved_tensors
        bias = grad_output.sum(0) if ctx.needs_grad["bias"] else None
        return {"x": grad_output @ weight, "weight": grad_output.mT @ x, "bias": bias}

    def jvp(self, ctx: Any, of_input: Tensor, of_weight: Tensor, of_bias: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        tangent = of_input @ weight.T + x @ of_weight.T
        return tangent if of_bias is None else tangent + of_bias


class OwnRule(FuncLinear):
    """With a rule for vmap written by hand."""

    generate_vmap_rule = False

    def vmap(self, info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Any) -> Any:
        assert len(in_dims) == 3
        assert in_dims[1:] == (None, None)
        return self(x.movedim(in_dims[0], 0).flatten(0, -2), weight, bias).unflatten(0, (info.batch_size, -1)), 0


class Largest(Function):
    generate_vmap_rule = True

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        values, places = x.max(-1)
        return Auxiliary("largest"), values, Auxiliary(places)

    def setup_context(self, ctx: Any, inputs: tuple[Tensor], output: tuple[Any, ...]) -> None:
        assert output[0] == "largest"
        ctx.save_for_backward(inputs[0], output[2])

    def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
        x, places = ctx.saved_tensors
        gradient = torch.zeros_like(x).scatter(-1, places.unsqueeze(-1), grad_output.unsqueeze(-1))
        assert isinstance(gradient, Tensor)
        return gradient


def test_setup_context_gives_the_same_gradients() -> None:
    assert gradcheck(FuncLinear(), tensors(), check_forward_ad=True, check_batched_grad=True)
    assert gradcheck(FuncLinear(), tensors()[:2], check_forward_ad=True)
    assert gradgradcheck(FuncLinear(), tensors())


@pytest.mark.parametrize(
    "transform",
    [
        lambda loss: vmap(grad(loss), (None, 0)),
        lambda loss: grad(lambda w, xs: vmap(loss, (None, 0))(w, xs).sum()),
        lambda loss: lambda w, xs: vmap(vmap(loss, (None, 0)), (None, 1))(w, torch.stack([xs, 2 * xs], 1)),
        lambda loss: lambda w, xs: jacrev(jacrev(loss))(w, xs[0]),
        lambda loss: lambda w, xs: jacrev(loss, argnums=1)(w, xs[0]),
        lambda loss: lambda w, xs: jacfwd(loss)(w, xs[0]),
        lambda loss: lambda w, xs: hessian(loss)(w, xs[0]),
        lambda loss: lambda w, xs: jvp(loss, (w, xs[0]), (w.cos(), xs[0].cos()))[1],
        lambda loss: lambda w, xs: vjp(loss, w, xs[0])[1](torch.tensor(2.0, dtype=w.dtype))[1],
    ],
    ids=["vmap grad", "grad vmap", "vmap vmap", "jacrev jacrev", "jacrev", "jacfwd", "hessian", "jvp", "vjp"],
)
def test_transforms_agree_with_plain_operations(transform: Any) -> None:
    x, weight, bias = (tensor.detach() for tensor in tensors())
    linear = FuncLinear()
    batches = x.unsqueeze(1)
    ours = transform(lambda w, x: linear(x, w, bias).sin().square().sum())(weight, batches)
    plain = transform(lambda w, x: F.linear(x, w, bias).sin().square().sum())(weight, batches)
    torch.testing.assert_close(ours, plain)


def test_a_rule_for_vmap_written_by_hand() -> None:
    x, weight, _ = (tensor.detach() for tensor in tensors())
    rows = torch.stack([x, 2 * x], 1)
    torch.testing.assert_close(vmap(lambda x: OwnRule()(x, weight), 1)(rows), rows.movedim(1, 0) @ weight.T)


def test_auxiliary_outputs_under_transforms() -> None:
    x = tensors()[0].detach()
    largest = Largest()

    def values(row: Tensor) -> Tensor:
        name, values, _ = largest(row)
        assert name == "largest"
        return values

    torch.testing.assert_close(vmap(lambda row: largest(row)[1:])(x), tuple(x.max(-1)))
    one_hot = F.one_hot(x.argmax(-1), 3).double()
    torch.testing.assert_close(vmap(grad(values))(x), one_hot)
    torch.testing.assert_close(grad(lambda x: vmap(values)(x).sum())(x), one_hot)


def test_forward_mode_with_auxiliary_arguments_and_outputs() -> None:
    class Scaled(Function):
        auxiliary = ("factor",)

        def forward(self, ctx: Any, x: Tensor, factor: Tensor) -> tuple[Any, ...]:
            ctx.save_for_forward(factor)
            ctx.save_for_backward(factor)
            return x * factor, Auxiliary(x.argmax()), x * 2

        def backward(self, ctx: Any, of_scaled: Tensor, of_double: Tensor) -> dict[str, Tensor]:
            return {"x": of_scaled * ctx.saved_tensors[0] + 2 * of_double}

        def jvp(self, ctx: Any, of_input: Tensor, of_factor: None) -> tuple[Tensor, Tensor]:
            assert of_factor is None
            return of_input * ctx.saved_tensors[0], of_input * 2

    factor = tensors(1)[0].detach()
    assert gradcheck(lambda x: Scaled()(x, factor)[::2], tensors()[:1], check_forward_ad=True)


def test_a_wrong_count_of_tangents_is_told() -> None:
    class OneTooMany(Function):
        def forward(self, ctx: Any, x: Tensor) -> tuple[Any, ...]:
            return x * 2, Auxiliary(x.argmax())

        def jvp(self, ctx: Any, of_x: Tensor) -> tuple[Tensor, None]:
            return of_x * 2, None

    x = tensors()[0].detach()
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(FunctionError, match="jvp of OneTooMany returned 2 tangents; expected 1"),
    ):
        OneTooMany()(torch.autograd.forward_ad.make_dual(x, x))


def test_functional_call_swaps_the_parameters_of_an_instance() -> None:
    class Owns(FuncLinear):
        def __init__(self) -> None:
            self.weight = torch.nn.Parameter(tensors()[1].detach())

    owns, x = Owns(), tensors()[0].detach()
    other = {"weight": tensors(1)[1].detach()}
    torch.testing.assert_close(functional_call(owns, other, (x,)), x @ other["weight"].T)
    gradients = grad(lambda p: functional_call(owns, p, (x,)).sum())(other)
    torch.testing.assert_close(gradients["weight"], x.sum(0).expand(2, 3))


def test_what_does_not_work_says_so() -> None:
    class NoRule(FuncLinear):
        generate_vmap_rule = False

    x, weight, bias = (tensor.detach() for tensor in tensors())
    with pytest.raises(RuntimeError, match="tried to vmap over NoRule"):
        vmap(NoRule(), (0, None, None))(x.unsqueeze(1), weight, bias)
    with pytest.raises(RuntimeError, match="must override the setup_context"):
        grad(lambda x: MyLinear()(x, weight).sum())(x)
    with pytest.raises(NotImplementedError, match="jvp"), torch.autograd.forward_ad.dual_level():
        MyLinear()(torch.autograd.forward_ad.make_dual(x, x), weight)


def test_nothing_is_remembered_inside_of_a_transform() -> None:
    class Remembers(FuncLinear):
        def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            self.remember("x", x)
            return super().forward(x, weight, bias)

    x, weight, _ = (tensor.detach() for tensor in tensors())
    remembers = Remembers()
    with pytest.raises(FunctionError, match=r"remember 'x' inside of torch.func.vmap") as raised:
        vmap(remembers, (0, None))(x.unsqueeze(1), weight)
    assert raised.value.__notes__ == ["in forward of the Function Remembers"]
    remembers(x, weight)
    assert len(remembers.remembered["x"]) == 1
