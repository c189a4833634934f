"""An instance is a module: hooks, parameters of its own, what else torch does with modules, and our recordings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import retrograd as rg
from retrograd.core.errors import FunctionError
from retrograd.tools.functions.function import Function
from tests.tools.functions.linear import MyLinear, tensors


class Owning(MyLinear):
    """With weight and bias of its own, as a layer."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        _, weight, shift = tensors()
        self.weight = nn.Parameter(weight.detach())
        self.register_parameter("bias", nn.Parameter(shift.detach()) if bias else None)


def plain_twin(owning: Owning) -> nn.Linear:
    twin = nn.Linear(3, 2, bias=owning.bias is not None, dtype=torch.float64)
    twin.load_state_dict(owning.state_dict())
    return twin


@pytest.mark.parametrize("bias", [True, False])
def test_its_parameters_stand_in_for_arguments(bias: bool) -> None:
    owning = Owning(bias)
    twin, x = plain_twin(owning), tensors(1)[0]
    for module in (owning, twin):
        module(x).square().sum().backward()
    for mine, theirs in zip(owning.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)
    other = tensors(2)[1]
    torch.testing.assert_close(owning(x, other), F.linear(x, other, owning.bias))
    torch.testing.assert_close(owning(x, bias=other[:, 0]), F.linear(x, owning.weight, other[:, 0]))


def test_a_parameter_that_autograd_would_not_see_is_refused() -> None:
    class Scaled(Function):
        def __init__(self) -> None:
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            return x * self.scale

    with pytest.raises(FunctionError, match="Scaled cannot hold the parameter 'scale'"):
        Scaled()


def test_a_buffer_stands_in_too_and_others_are_its_own_affair() -> None:
    class Masked(Function):
        auxiliary = ("mask",)

        def __init__(self) -> None:
            self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))
            self.register_buffer("other", torch.zeros(2))

        def forward(self, ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
            ctx.save_for_backward(mask)
            return x * mask

        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
            return {"x": grad_output * ctx.saved_tensors[0]}

    masked, x = Masked(), torch.ones(3, requires_grad=True)
    masked(x).sum().backward()
    assert torch.equal(x.grad, masked.mask)  # type: ignore[arg-type]
    assert set(masked.state_dict()) == {"mask", "other"}


def test_hooks_on_it_are_called_as_on_any_module() -> None:
    owning, seen = Owning(), []
    handles = [
        owning.register_forward_pre_hook(lambda module, args: seen.append((module is owning, len(args)))),
        owning.register_forward_hook(lambda module, args, output: 2 * output),
        owning.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0].shape)),
    ]
    x = tensors()[0]
    output = owning(x)
    torch.testing.assert_close(output, 2 * F.linear(x, owning.weight, owning.bias))
    output.sum().backward()
    assert seen == [(True, 1), output.shape]
    for handle in handles:
        handle.remove()


def test_parametrizations_work() -> None:
    owning = parametrizations.weight_norm(Owning())
    twin = parametrizations.weight_norm(plain_twin(Owning()))
    x = tensors(1)[0]
    for module in (owning, twin, copy.deepcopy(owning)):
        module(x).sum().backward()
    for (name, mine), theirs in zip(owning.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


def test_torchscript_is_refused() -> None:
    with pytest.raises(FunctionError, match=r"MyLinear cannot be compiled by torch.jit.script"):
        MyLinear().__prepare_scriptable__()


def test_torchscript_of_a_model_with_one_is_refused() -> None:
    with pytest.raises(FunctionError, match=r"Owning cannot be compiled by torch.jit.script"):
        torch.jit.script(nn.Sequential(nn.ReLU(), Owning()))


def test_our_recordings_know_its_arguments_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), Owning())
    sites = ["1:output.grad", "1:input.x.grad", "1:weight.grad"]
    with rg.record(model, tmp_path / "run", sites=sites, tensors="*") as recording:
        model(tensors()[0]).square().sum().backward()
    recorded = {site: recording.history[site].tensors[-1].tensor for site in sites}
    hidden = model[0](tensors()[0]).detach().requires_grad_()
    output = F.linear(hidden, model[1].weight, model[1].bias)
    expected = torch.autograd.grad(output.square().sum(), (output, hidden, model[1].weight))
    for site, theirs in zip(sites, expected, strict=True):
        torch.testing.assert_close(recorded[site], theirs)


def test_our_traces_call_the_node_by_the_name_of_the_class() -> None:
    model = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), Owning())
    loss = model(tensors()[0]).sum()
    assert "OwningBackward" in [node.name for node in rg.walk(loss)]
    with rg.trace() as trace:
        model(tensors()[0]).sum().backward()
    assert [event.place for event in trace.find("OwningBackward")] == ["1:OwningBackward"]


def test_one_node_is_run_again_alone() -> None:
    x, weight, bias = tensors()
    incoming = torch.randn(4, 2, dtype=torch.float64)
    again = rg.rerun(MyLinear()(x, weight, bias), incoming)
    expected = torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), incoming)
    for mine, theirs in zip(again, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
