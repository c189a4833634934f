"""Torch.compile leaves a Function to the interpreter: the graph breaks at its call, and results are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.tools.functions.function import Function
from tests.tools.functions.linear import RememberingLinear, tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # read by dynamo
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = RememberingLinear()
        self.weight = nn.Parameter(tensors()[1].detach())

    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x.sin(), self.weight)
        assert isinstance(output, Tensor)
        return output.cos().sum()


class Counter:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def test_a_compiled_model_with_one_trains_as_before() -> None:
    plain, net, counter = Net(), Net(), Counter()
    compiled = torch.compile(net, backend=counter)
    for step in range(3):
        losses = [module(tensors(step)[0]) for module in (plain, compiled)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    assert torch.equal(plain.weight.grad, net.weight.grad)  # type: ignore[arg-type]
    assert counter.graphs == 2  # one before and one behind it, and none anew at later steps
    for mine, theirs in zip(net.linear.remembered["grad_output"], plain.linear.remembered["grad_output"], strict=True):
        assert torch.equal(mine, theirs)


def test_a_compiled_instance_runs() -> None:
    x, weight, bias = tensors()
    linear = RememberingLinear()
    output = torch.compile(linear, backend="eager")(x, weight, bias)
    output.sum().backward()
    assert torch.equal(output, linear(x, weight, bias))
    assert len(linear.remembered["grad_output"]) == 1


def test_what_the_user_compiles_inside_of_it_is_compiled() -> None:
    counter = Counter()
    scale = torch.compile(lambda x: x * 3, backend=counter)

    class Scaled(Function):
        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            output = scale(x)
            assert isinstance(output, Tensor)
            return output

        def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
            return 3 * grad_output

    x = torch.ones(2, requires_grad=True)
    Scaled()(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))  # type: ignore[arg-type]
    assert counter.graphs == 1


def test_a_graph_that_may_not_break_is_refused_by_torch() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="current_graph_task"):
        torch.compile(Net(), backend="eager", fullgraph=True)(tensors()[0])


def test_a_backward_pass_that_is_compiled_runs_it_too() -> None:
    input_, weight, bias = tensors()
    linear = RememberingLinear()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        linear(input_, weight, bias).sum().backward()
    torch.testing.assert_close(weight.grad, input_.sum(0).expand(2, 3))
    (kept,) = linear.remembered["grad_output"]
    assert torch.equal(kept, torch.ones(4, 2, dtype=torch.float64))


def test_an_export_takes_the_operations_of_forward_and_remembers_nothing() -> None:
    class Keeps(RememberingLinear):
        def forward(self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            self.remember("x", x)
            return super().forward(ctx, x, weight, bias)

    net = Net()
    net.linear = Keeps()
    value = tensors()[0].detach()
    exported = torch.export.export(net, (value,))
    assert list(net.linear.remembered) == []
    assert torch.equal(exported.module()(value), net(value))
