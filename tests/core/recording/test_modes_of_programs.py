"""Modes of the program (counters and logs of operations) see what they see without a recording."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import retrograd as rg

Program = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]


class Operations(TorchDispatchMode):
    """Lists what is carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 4)
        self.twin = nn.Parameter(torch.ones(6, 3))

    def forward(self, batch: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.first(batch)))
        out = checkpoint(self.head, hidden, use_reentrant=False) if self.training else self.head(hidden)
        return out + 0.1 * self.twin.sum()


def step_plainly(net: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(net(data), labels).backward()
    optimizer.step()


def accumulate(net: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    for part, wanted in zip(data.chunk(2), labels.chunk(2), strict=True):
        (F.cross_entropy(net(part), wanted) / 2).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()


def evaluate(net: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, labels: Tensor) -> None:
    step_plainly(net, optimizer, data, labels)
    net.eval()
    with torch.no_grad():
        F.cross_entropy(net(data), labels)
    net.train()


def update_by_hand(net: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, labels: Tensor) -> None:
    grads = torch.autograd.grad(F.cross_entropy(net(data), labels), [*net.parameters()])
    with torch.no_grad():
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            parameter -= 0.1 * grad


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def list_operations(program: Program, net: nn.Module) -> list[str]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data, labels = torch.randn(8, 16), torch.randint(0, 4, (8,))
    with Operations() as seen:
        for _ in range(6):
            program(net, optimizer, data, labels)
    return seen.names


@pytest.mark.parametrize("options", [{}, {"sites": "*", "tensors": "*"}], ids=["default", "everything"])
@pytest.mark.parametrize("program", [step_plainly, accumulate, evaluate, update_by_hand])
def test_operations_of_a_recorded_program_are_those_of_the_bare_one(
    program: Program, options: dict[str, str], tmp_path: Path
) -> None:
    bare = list_operations(program, make_net())
    net = make_net()
    with rg.record(net, tmp_path / "run", **options):
        assert list_operations(program, net) == bare
    outputs = rg.open_run(tmp_path / "run").history["first:output"]
    assert len(outputs.mean) >= 2
    assert outputs.signed_histograms


class Functions(TorchFunctionMode):
    """Counts the uses of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_function_mode_of_the_program_sees_little_of_a_recording() -> None:
    """Such a mode is called for each attribute, and ``torch.set_default_device`` is one."""
    counts = []
    for is_recorded in (False, True):
        net = make_net()
        with rg.record(net) if is_recorded else nullcontext(), Functions() as seen:
            list_operations(step_plainly, net)
        counts.append(seen.count)
    assert counts[0] <= counts[1] < 1.25 * counts[0]
