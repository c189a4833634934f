"""What runs in an interlude meets nothing of the forward around it, which goes on as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.core.hooks.isolation import NoTensorHooks, isolated_autograd, run_backward, strip_hooks


def test_hooks_on_saved_tensors_are_set_aside_in_their_order() -> None:
    packed: list[str] = []

    def packing(name: str) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: packed.append(name) or tensor, lambda tensor: tensor)

    x = torch.ones(2, requires_grad=True)
    with packing("outer"):
        with packing("inner"):
            with isolated_autograd():
                x.exp()
            assert packed == []
            x.exp()
        x.exp()
    assert packed == ["inner", "outer"]


def test_hooks_come_back_after_an_error() -> None:
    packed: list[Tensor] = []
    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        with pytest.raises(ZeroDivisionError), isolated_autograd():
            raise ZeroDivisionError
        x.exp()
    assert len(packed) == 1


def test_dispatch_modes_and_grad_modes_are_set_aside() -> None:
    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode(), torch.inference_mode():
        with isolated_autograd():
            y = torch.ones(2, requires_grad=True) * 2
        assert seen == []
        assert y.requires_grad
        assert not y.is_inference()
        torch.ones(2)
    assert len(seen) == 1


def test_a_backward_pass_adds_to_leaves() -> None:
    x = torch.ones(2, requires_grad=True)
    run_backward([x * 3, x.sum()], [torch.tensor([1.0, 2.0]), torch.tensor(1.0)])
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 7.0]


def test_a_bare_module_runs_no_hook() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: output * 0)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    model.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0,))
    strip_hooks(model)
    x = torch.ones(1, 2, requires_grad=True)
    output = model(x)
    assert torch.equal(output, model[0].forward(x))
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.any()


def test_no_tensor_takes_a_hook() -> None:
    x = torch.ones(2, requires_grad=True)
    with NoTensorHooks():
        handle = (x * 1).register_hook(lambda gradient: gradient * 0)
        x.register_hook(lambda gradient: gradient * 0)
    handle.remove()
    x.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]
