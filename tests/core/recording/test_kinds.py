"""Tensors and modules of unusual kinds: every dtype and layout, odd modules, ``torch.func``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.recording.collector import collect
from tests.core.recording.oracle import assert_row


class Returns(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor([0.5, -2.0, 3.0]))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


VALUES = {
    "float16": torch.tensor([1.5, -2.0, 0.0, float("inf")], dtype=torch.float16),
    "bfloat16": torch.tensor([1.5, -2.0, 0.0, float("nan")], dtype=torch.bfloat16),
    "float64": torch.tensor([1e-100, 1e100, -3.0], dtype=torch.float64),
    "complex64": torch.tensor([1 + 2j, -3j]),
    "conjugate": torch.tensor([1 + 2j, -3j]).conj(),
    "int8": torch.tensor([-128, 127, 0], dtype=torch.int8),
    "int64": torch.tensor([2**40, -5, 0]),
    "uint8": torch.tensor([255, 0], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 3),
    "0-d": torch.tensor(2.5),
    "expanded": torch.tensor([1.0, 2.0]).expand(5, 2),
    "strided": torch.arange(12.0).view(3, 4)[:, ::2],
    "transposed": torch.arange(12.0).view(3, 4).T,
    "sparse": torch.sparse_coo_tensor([[0, 2]], [1.0, -3.0], (4,), check_invariants=True),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_every_kind(kind: str) -> None:
    net = Returns(lambda module, x: x)
    value = VALUES[kind]
    with collect(net, sites=["*:output", "*:input*"]) as seen:
        assert net(value) is value
    assert_row(seen.one("self:output"), value)
    assert_row(seen.one("self:input.args.0"), value)
    assert not seen.facts["faults"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_gradients_of_every_dtype(dtype: torch.dtype) -> None:
    net = nn.Linear(3, 2, dtype=dtype)
    outputs: list[torch.Tensor] = []
    net.register_forward_hook(lambda module, args, output: (output.retain_grad(), outputs.append(output))[0])
    with collect(net) as seen:
        net(torch.randn(4, 3, dtype=dtype)).abs().square().sum().backward()
    assert_row(seen.one("self:output"), outputs[0])
    assert_row(seen.one("self:output.grad"), outputs[0].grad)  # type: ignore[arg-type]
    assert_row(seen.one("self:weight.grad"), net.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_of_an_embedding(optimizer: Any) -> None:
    net = nn.Embedding(10, 3, sparse=True)
    trainer = optimizer(net.parameters(), lr=0.1)
    before = net.weight.detach().clone()
    with collect(net) as seen:
        net(torch.tensor([1, 4, 4])).square().sum().backward()
        gradient = net.weight.grad
        trainer.step()
    assert gradient is not None
    assert gradient.is_sparse
    assert_row(seen.one("self:weight.grad"), gradient)
    row = seen.one("self:weight.update")
    assert row.count == 30
    assert row.zeros == 8 * 3
    assert row.l2 == pytest.approx((net.weight.detach() - before).norm().item(), rel=1e-4)


def test_a_0d_output_and_an_empty_gradient() -> None:
    net = Returns(lambda module, x: (x[:0] * module.weight, (x * module.weight).sum()))
    with collect(net) as seen:
        empty, total = net(torch.ones(2, 3))
        (empty.sum() + total).backward()
    assert seen.one("self:output.0").count == 0
    assert seen.one("self:output.0.grad").count == 0
    assert seen.one("self:output.1").count == 1
    assert seen.one("self:output.1.grad").mean == 1.0


def test_a_module_that_returns_its_own_parameter() -> None:
    """The output is a leaf: a hook on it would stay for ever."""
    net = nn.Sequential(Returns(lambda module, x: module.weight), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hooks = []
    with collect(net) as seen:
        for _ in range(4):
            net(torch.ones(1)).sum().backward()
            hooks.append(len(net[0].weight._backward_hooks or ()))
            gradient = net[0].weight.grad.clone()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(300):  # forwards that wait for no backward
            net(torch.ones(1))
        assert len(net[0].weight._backward_hooks or ()) <= 1 + 100
    assert len(set(hooks)) == 1
    assert not net[0].weight._backward_hooks
    assert_row(seen.one("0:output.grad", step=3), gradient)
    assert_row(seen.one("0:weight.grad", step=3), gradient)


def test_a_module_that_returns_its_input() -> None:
    net = nn.Sequential(nn.Identity(), nn.Flatten(0), nn.Identity())
    x = torch.ones(3, requires_grad=True)
    with collect(net) as seen:
        (net(x) * 2 + x).sum().backward()
    assert x.grad is not None
    for path in ("0", "2"):
        assert_row(seen.one(f"{path}:output.grad"), x.grad)  # one tensor, so its whole gradient
    assert not x._backward_hooks


def test_lazy_modules_are_recorded_from_their_first_step() -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1))
    gradients = []
    with collect(net) as seen:
        for _ in range(2):
            net(torch.randn(5, 3)).sum().backward()
            gradients.append(net[0].weight.grad.clone())
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            net.zero_grad()
    for step, gradient in enumerate(gradients):
        assert_row(seen.one("0:weight.grad", step=step), gradient)
    assert [row.step for row in seen.all("2:bias.update")] == [0, 1]
    assert not seen.facts["faults"]


def test_attention_with_weights_that_no_module_call_uses() -> None:
    net = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4)
    with collect(net) as seen:
        out, _ = net(x, x, x)
        out.sum().backward()
    assert {"self:output.0", "self:output.1", "self:in_proj_weight.grad", "out_proj:weight.grad"} <= set(seen.sites())
    reasons = {item["site"]: item["reason"] for item in seen.facts["not_recorded"]}
    assert reasons["out_proj:output"].startswith("used by its parent, an nn.MultiheadAttention")
    assert not any("never called" in reason for reason in reasons.values())


# ---- tensors without numbers of their own -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "choices",
    [{}, {"sites": "*:output.grad"}, {"sites": "*:input*"}, {"tensors": "*:output*", "statistics": False}],
    ids=["default", "gradients", "inputs", "tensors"],
)
def test_under_torch_func_nothing_is_recorded_and_nothing_breaks(choices: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    parameters = dict(net.named_parameters())
    x = torch.randn(6, 3)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, parameters, (x,)).square().sum()

    def compute() -> list[torch.Tensor]:
        slopes = torch.func.grad(loss)(parameters, x)
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        hessian = torch.func.hessian(lambda x: loss(parameters, x))(x[:1])
        _, tangent = torch.func.jvp(net, (x,), (torch.ones_like(x),))
        return [*slopes.values(), *each.values(), hessian, tangent.detach()]

    expected = compute()
    with collect(net, **choices) as seen:
        found = compute()
        net(x).sum().backward()
    assert all(map(torch.equal, expected, found))
    assert not seen.facts["faults"]
    assert any("torch.func" in item["reason"] for item in seen.facts["not_recorded"])


@pytest.mark.parametrize("kind", ["meta", "quantized", "nested"])
def test_tensors_that_cannot_be_read_are_noted(kind: str) -> None:
    makers = {
        "meta": lambda: torch.ones(3, device="meta"),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch say that quantized tensors are on their way out
        value = makers[kind]()
    net = Returns(lambda module, x: (x, module.weight * 2))
    with collect(net) as seen:
        net(value)[1].sum().backward()
    assert_row(seen.one("self:output.1.grad"), torch.ones(3))
    assert not seen.facts["faults"]
    [reason] = [item["reason"] for item in seen.facts["not_recorded"] if item["site"] == "self:output.0"]
    assert any(word in reason for word in (kind, "decides itself"))


def test_a_subclass_that_computes_as_a_plain_tensor_is_read() -> None:
    class Tagged(torch.Tensor):
        pass

    net = Returns(lambda module, x: x * 2)
    with collect(net) as seen:
        net(torch.ones(3).as_subclass(Tagged))
    assert seen.one("self:output").mean == 2.0
