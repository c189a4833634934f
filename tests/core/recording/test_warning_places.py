"""Warnings are placed where they are without us: a filter of the user's names a module, and Python repeats none."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg

X = torch.ones(1, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_full_backward_hook(lambda module, to_inputs, to_outputs: None)  # warns where no input needs grad

    def forward(self, x: Tensor) -> Tensor:
        x = F.softmax(self.b(checkpoint(self.a, x)))  # both warn: which dimension? which kind of checkpoint?
        return x * F.mse_loss(x, torch.ones(2))  # of another size


class Warns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        for level in range(1, 8):
            warnings.warn(f"backward {level}", stacklevel=level)
        return gradient


Program = Callable[[Net, torch.optim.Optimizer], None]


def backward(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net(X).sum().backward()


def several_levels(net: Net, optimizer: torch.optim.Optimizer) -> None:
    Warns.apply(net.a(X)).sum().backward()
    torch.autograd.backward(Warns.apply(net.a(X)).sum())
    torch.autograd.grad(Warns.apply(net.a(X)).sum(), [net.a.weight])


def gradient_of_no_leaf(net: Net, optimizer: torch.optim.Optimizer) -> None:
    assert net.a(X).grad is None


def scaled(net: Net, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(net(X).sum()).backward()

    def closure() -> Tensor:
        for level in range(1, 5):
            warnings.warn(f"closure {level}", stacklevel=level)
        return net.a(X).sum()

    optimizer.step(closure)
    optimizer.zero_grad()
    net.zero_grad()


def scheduled(net: Net, optimizer: torch.optim.Optimizer) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.step()  # before the optimizer
    scheduler.step(3)
    nn.utils.clip_grad_norm_([], 1.0)
    nn.utils.clip_grad_norm(net.parameters(), 1.0)


class OwnZero(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.param_groups.append(_Warning())  # gone through by zero_grad


class _Warning(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        for level in range(1, 5):
            warnings.warn(f"zero_grad {level}", stacklevel=level)
        return []


def cleared(net: Net, optimizer: torch.optim.Optimizer) -> None:
    OwnZero(net.parameters()).zero_grad()


PROGRAMS = [backward, several_levels, gradient_of_no_leaf, scaled, scheduled, cleared]


def list_warnings(program: Program, *, recorded: bool) -> list[tuple[str, int, str]]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with rg.record(net) if recorded else nullcontext():
            for _ in range(3):  # the first steps are noted operation by operation
                program(net, optimizer)
    return [(each.filename, each.lineno, str(each.message)) for each in caught]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_warnings_are_placed_as_without_us(program: Program) -> None:
    bare, ours = (list_warnings(program, recorded=recorded) for recorded in (False, True))
    assert ours == bare
    assert any(file == __file__ for file, _, _ in bare)


def test_a_filter_for_the_users_module_makes_an_error_as_without_us() -> None:
    raised = []
    for recorded in (False, True):
        net = nn.Linear(2, 2)
        net.register_full_backward_hook(lambda module, to_inputs, to_outputs: None)
        with warnings.catch_warnings(), rg.record(net) if recorded else nullcontext():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", category=UserWarning, module=__name__)
            with pytest.raises(UserWarning) as found:
                net(X).sum().backward()
            raised.append(str(found.value))
    assert raised[0] == raised[1]


def test_tracebacks_show_the_lines_of_what_stands_between() -> None:
    net = nn.Linear(2, 2)
    with rg.record(net):
        try:
            net(X).backward()  # not a scalar
        except RuntimeError as error:
            shown = traceback.extract_tb(error.__traceback__)
    assert not [frame for frame in shown if "retrograd" in frame.filename and not frame.line]
