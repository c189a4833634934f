"""One real autograd Function underneath: what torch's own do, ours do, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from retrograd.core.errors import FunctionError
from retrograd.tools.functions.function import Function
from tests.tools.functions.linear import MyLinear, PlainLinear, tensors


def test_gradients_are_bitwise_those_of_a_plain_function() -> None:
    x, weight, bias = tensors()
    for arguments in ((x, weight, bias), (x, weight)):
        ours, plain = MyLinear()(*arguments), PlainLinear.apply(*arguments, *[None][: 3 - len(arguments)])
        assert torch.equal(ours, plain)
        incoming = torch.randn_like(ours)
        for mine, theirs in zip(
            torch.autograd.grad(ours, arguments, incoming),
            torch.autograd.grad(plain, arguments, incoming),
            strict=True,
        ):
            assert torch.equal(mine, theirs)


def test_gradcheck_and_gradgradcheck_pass() -> None:
    assert gradcheck(MyLinear(), tensors())
    assert gradgradcheck(MyLinear(), tensors())
    assert gradcheck(MyLinear(), tensors()[:2])


def test_gradcheck_finds_a_wrong_backward() -> None:
    class Wrong(MyLinear):
        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
            return {**super().backward(ctx, grad_output), "bias": 2 * grad_output.sum(0)}

    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        gradcheck(Wrong(), tensors())


def test_the_node_has_the_name_of_the_class() -> None:
    output = MyLinear()(*tensors())
    assert output.grad_fn is not None
    assert output.grad_fn.name() == "MyLinearBackward"
    assert isinstance(output.grad_fn, torch.autograd.function.BackwardCFunction)


def test_an_instance_is_one_of_its_class_and_has_its_name() -> None:
    function = MyLinear()
    assert isinstance(function, MyLinear)
    assert type(function).__qualname__ == MyLinear.__qualname__
    assert type(function).__module__ == MyLinear.__module__
    assert repr(function) == "MyLinear()"


def test_keywords_defaults_and_values_that_are_no_tensors() -> None:
    class Affine(Function):
        def forward(self, ctx: Any, x: Tensor, scale: float = 2.0, *, shift: Tensor | None = None, name: str = "a"):  # type: ignore[no-untyped-def]
            ctx.scale = scale
            self.seen = (scale, shift is None, name)
            return x * scale + (0 if shift is None else shift)

        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
            return {"x": grad_output * ctx.scale, "shift": grad_output}

    affine = Affine()
    x, shift = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    affine(x)
    assert affine.seen == (2.0, True, "a")
    assert gradcheck(lambda x, shift: affine(x, scale=3.0, shift=shift, name="b"), (x, shift))
    assert affine.seen == (3.0, False, "b")


def test_any_number_of_tensors() -> None:
    class WeightedSum(Function):
        def forward(self, ctx: Any, *terms: Tensor, factor: float = 3.0) -> Tensor:
            ctx.factor, ctx.count = factor, len(terms)
            ctx.seen = tuple(ctx.needs_grad)
            return factor * torch.stack(terms).sum(0)

        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
            return {f"terms[{index}]": grad_output * ctx.factor for index in range(ctx.count)}

    terms = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    weighted = WeightedSum()
    assert gradcheck(weighted, terms)
    assert weighted(*terms).grad_fn.seen == ("terms[0]", "terms[1]", "terms[2]", "terms[3]", "factor")


def test_what_needs_a_gradient_is_told_by_position_and_by_name() -> None:
    x, weight, bias = tensors()
    seen = []

    class Looks(MyLinear):
        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
            seen.append((ctx.needs_input_grad, dict(ctx.needs_grad)))
            return super().backward(ctx, grad_output)

    looks = Looks()
    looks(x.detach(), weight, bias).sum().backward()
    looks(x, weight.detach()).sum().backward()
    assert seen == [
        ((False, True, True), {"x": False, "weight": True, "bias": True}),
        ((True, False, False), {"x": True, "weight": False, "bias": False}),
    ]


def test_gradients_by_position_follow_torchs_rule() -> None:
    class ByPosition(MyLinear):
        def backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            return (*super().backward(ctx, grad_output).values(), None, None)  # further Nones are let pass

    class Square(Function):
        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:  # one argument, one gradient
            return grad_output * 2 * ctx.saved_tensors[0]

    assert gradcheck(ByPosition(), tensors())
    assert gradcheck(Square(), tensors()[:1])


def test_names_that_are_missing_have_no_gradient() -> None:
    class OnlyInput(MyLinear):
        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
            return {"x": grad_output @ ctx.saved_tensors[1]}

    x, weight, bias = tensors()
    OnlyInput()(x, weight, bias).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    assert bias.grad is None


def test_several_passes_over_one_call_and_several_calls_of_one_instance() -> None:
    x, weight, bias = tensors()
    function = MyLinear()
    first, second = function(x, weight, bias), function(2 * x, weight)
    for output, expected in ((first, x), (second, 2 * x), (first, x)):
        (gradient,) = torch.autograd.grad(output.sum(), weight, retain_graph=True)
        (theirs,) = torch.autograd.grad(F.linear(expected, weight).sum(), weight)
        torch.testing.assert_close(gradient, theirs)
    first.sum().backward()
    with pytest.raises(RuntimeError, match="a second time") as raised:
        first.sum().backward()
    assert any("MyLinear" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_there_is_no_graph(mode: Any) -> None:
    with mode():
        output = MyLinear()(*tensors())
    assert output.grad_fn is None
    assert torch.equal(output, F.linear(*tensors()))


def test_writing_into_an_argument() -> None:
    class DoubleInPlace(Function):
        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
            return 2 * grad_output

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    inner = x.clone()
    kept = inner.sin()
    output = DoubleInPlace()(inner)
    assert output is inner
    output.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_outputs_without_a_gradient_and_gradients_that_are_not_made_up() -> None:
    got = []

    class Split(Function):
        def forward(self, ctx: Any, x: Tensor, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
            ctx.set_materialize_grads(zeros)
            order = x.argsort()
            ctx.mark_non_differentiable(order)
            return 2 * x, 3 * x, order

        def backward(self, ctx: Any, *grad_outputs: Tensor) -> dict[str, Tensor]:
            got.append(grad_outputs)
            return {"x": sum(f * g for f, g in zip((2, 3), grad_outputs, strict=False) if g is not None)}  # type: ignore[dict-item]

    x = torch.randn(3, requires_grad=True)
    for zeros in (True, False):
        double, _triple, order = Split()(x, zeros)
        assert not order.requires_grad
        double.sum().backward()
    (g2, g3, of_order), (_, none, other) = got
    assert torch.equal(g2, torch.ones(3))
    assert torch.equal(g3, torch.zeros(3))
    assert torch.equal(of_order, torch.zeros(3, dtype=torch.long))
    assert none is None
    assert other is None
    assert torch.equal(x.grad, torch.full((3,), 4.0))  # type: ignore[arg-type]


def test_methods_are_inherited_and_call_their_base() -> None:
    class Scaled(MyLinear):
        def forward(self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return 2 * super().forward(ctx, x, weight, bias)

        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
            return super().backward(ctx, 2 * grad_output)

    assert gradcheck(Scaled(), tensors())
    assert Scaled()(*tensors()).grad_fn.name() == "ScaledBackward"


def test_a_function_uses_another_in_its_backward() -> None:
    class Times(Function):
        def forward(self, ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a * b

        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
            a, b = ctx.saved_tensors
            return {"a": self(grad_output, b), "b": self(grad_output, a)}

    x = tensors()[0]
    assert gradgradcheck(Times(), (x, x.detach().clone().requires_grad_()))


def test_state_of_the_instance_is_its_own() -> None:
    class Counting(MyLinear):
        def __init__(self, start: int = 0) -> None:  # forgets super().__init__()
            self.calls = start

        def forward(self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            self.calls += 1
            return super().forward(ctx, x, weight, bias)

    one, other = Counting(), Counting(5)
    for function in (one, one, other):
        function(*tensors()).sum().backward()
    assert (one.calls, other.calls) == (2, 6)


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_an_exception_keeps_its_type_and_names_the_function(method: str) -> None:
    class Breaks(MyLinear):
        def forward(self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if method == "forward":
                raise ZeroDivisionError("no")
            return super().forward(ctx, x, weight, bias)

        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
            raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError) as raised:
        Breaks()(*tensors()).sum().backward()
    assert str(raised.value) == "no"
    assert raised.value.__notes__ == [f"in {method} of the Function Breaks"]


def test_saved_tensors_pass_through_saved_tensor_hooks() -> None:
    x, weight, bias = tensors()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        output = MyLinear()(x, weight, bias)
    output.sum().backward()
    assert packed == [x.shape, weight.shape]


def test_saved_tensors_that_were_overwritten_are_noticed() -> None:
    x, weight, bias = tensors()
    inner = x.clone()
    output = MyLinear()(inner, weight, bias)
    inner.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_saved_tensors_can_be_let_go_of_when_they_are_read() -> None:
    class ReadsTwice(MyLinear):
        clear_saved_tensors_on_access = True

        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
            gradients = super().backward(ctx, grad_output)
            with pytest.raises(RuntimeError):
                _ = ctx.saved_tensors
            return gradients

    ReadsTwice()(*tensors()).sum().backward()


def test_a_class_without_forward_has_no_instances() -> None:
    class Abstract(Function):
        def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
            return grad_output

    class Concrete(Abstract):
        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

    assert gradcheck(Concrete(), tensors()[:1])
    with pytest.raises(FunctionError, match="Abstract has no forward"):
        Abstract()


def test_a_class_without_backward_says_so_when_it_is_needed() -> None:
    class OneWay(Function):
        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    output = OneWay()(tensors()[0])
    with pytest.raises(NotImplementedError, match="backward"):
        output.sum().backward()


def test_mistakes_in_a_class_are_told_at_its_definition() -> None:
    with pytest.raises(FunctionError, match="forward of Old is a staticmethod"):

        class Old(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x

    with pytest.raises(FunctionError, match="forward of NoContext takes no ctx"):

        class NoContext(Function):
            def forward(self, x: Tensor) -> Tensor:
                return x

    with pytest.raises(FunctionError, match="'mask' auxiliary, which forward does not take"):

        class NoMask(Function):
            auxiliary = ("mask",)

            def forward(self, ctx: Any, x: Tensor) -> Tensor:
                return x

    with pytest.raises(FunctionError, match="has a method vjp"):

        class Vjp(Function):
            def forward(self, ctx: Any, x: Tensor) -> Tensor:
                return x

            def vjp(self, ctx: Any, grad_output: Tensor) -> Tensor:
                return grad_output


def test_calling_the_class_as_torchs_are_called_is_told() -> None:
    for arguments in (tensors(), tensors()[:1]):
        with pytest.raises(FunctionError, match="called as an object, not by apply"):
            MyLinear.apply(*arguments)


def test_apply_of_an_instance_is_the_call() -> None:
    function, (x, weight, bias) = MyLinear(), tensors()
    function.register_forward_hook(lambda module, args, output: output * 2)
    expected = 2 * F.linear(x, weight, bias)
    assert torch.equal(function.apply(x, weight, bias), expected)
    assert torch.equal(function.apply(x, weight, bias=bias), expected)
    (gradient,) = torch.autograd.grad(function.apply(x, weight, bias).sum(), bias)
    assert torch.equal(gradient, torch.full_like(bias, 2 * len(x)))


def test_apply_of_one_function_is_that_of_a_module() -> None:
    function, seen = MyLinear(), []
    model = nn.Sequential(function, nn.Tanh())
    assert function.apply(seen.append) is function
    assert function.apply(fn=seen.append) is function
    model.apply(seen.append)
    assert seen[:3] == [function, function, function]
    assert len(seen) == 5


def test_containers_in_which_gradients_would_be_lost_are_refused() -> None:
    class Takes(Function):
        def forward(self, ctx: Any, terms: Any) -> Any:
            return terms[0] * 2

        def backward(self, ctx: Any, grad_output: Tensor) -> None:
            return None

    class Returns(Function):
        def forward(self, ctx: Any, x: Tensor) -> Any:
            return {"double": x * 2}

        def backward(self, ctx: Any, grad_output: Tensor) -> None:
            return None

    x = tensors()[0]
    assert torch.equal(Takes()([x.detach()]), 2 * x)
    with pytest.raises(FunctionError, match="'terms' of Takes is a list with tensors that require grad"):
        Takes()([x.detach(), {"inner": x}])
    with pytest.raises(FunctionError, match="forward of Returns returned a dict with tensors"):
        Returns()(x)


def test_outputs_may_be_anything_beside_tensors() -> None:
    class WithShape(Function):
        def forward(self, ctx: Any, x: Tensor) -> Any:
            return x * 2, list(x.shape), None

        def backward(self, ctx: Any, grad_output: Tensor, *others: None) -> Tensor:
            assert others == (None, None)
            return 2 * grad_output

    x = tensors()[0]
    double, shape, nothing = WithShape()(x)
    assert (shape, nothing) == ([4, 3], None)
    double.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))  # type: ignore[arg-type]
