"""Training that is spread over processes, and the same in one: numbers that no order of adding changes.

Weights, data and the slope of the loss are small multiples of powers of two, so that float64 holds all that comes of
them in a few steps exactly, however a batch or a matrix is cut.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.core.history.history import History

STEPS = 3
ROWS = 8
RATE = 1 / 16


def whole_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def make_net(width: int = 8) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)).double()
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(whole_numbers(*parameter.shape, seed=number) / 8)
    return net


def data_of(step: int) -> Tensor:
    return whole_numbers(ROWS, 4, seed=100 + step)


def slope_of(step: int) -> Tensor:
    return whole_numbers(ROWS, 4, seed=200 + step)


def loss_of(out: Tensor, slope: Tensor) -> Tensor:
    """Its gradient with respect to ``out`` is ``slope`` divided by the number of rows."""
    return (out * slope).sum() / len(out)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


class Talk(TorchDispatchMode):
    """Counts what a process asks of others while it is on, by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it asks for what it needs by operations that come here
        if "c10d" in func.namespace and "wait_tensor" not in str(func):  # to wait for what was asked asks nothing
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Truth:
    """What one process sees that trains with whole batches: for each site, what there is of each step.

    Found with plain hooks; for parameters, of what autograd leaves in ``.grad`` and of weights before and after.

    Args:
        net: the whole model.
        inputs: look at what modules are called with, too.
    """

    def __init__(self, net: nn.Module, *, inputs: bool = False) -> None:
        self.seen: dict[str, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self.step = 0
        self.net = net
        for name, module in net.named_modules():
            module.register_forward_hook(lambda module, args, out, name=name or "self": self._see_output(name, out))
            if inputs:
                module.register_forward_pre_hook(lambda module, args, name=name or "self": self._see_input(name, *args))

    def _see_input(self, name: str, x: Tensor) -> None:
        """Each input of a chain of modules is used by one of them alone."""
        self.add(f"{name}:input.input", x)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.add(f"{name}:input.input.grad", gradient))

    def _see_output(self, name: str, out: Tensor) -> None:
        if torch.is_grad_enabled():
            self.add(f"{name}:output", out)
            out.register_hook(lambda gradient: self.add(f"{name}:output.grad", gradient))

    def add(self, site: str, tensor: Tensor) -> None:
        self.seen[site][self.step].append(tensor.detach().clone())

    def named(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self.net.named_parameters():
            path, _, key = name.rpartition(".")
            yield f"{path}:{key}", parameter

    def take_gradients(self) -> None:
        """A reduction is over: what is in ``.grad`` now is what an optimizer gets."""
        for name, parameter in self.named():
            if parameter.grad is not None:
                self.add(f"{name}.grad", parameter.grad)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        before = {name: parameter.detach().clone() for name, parameter in self.named()}
        optimizer.step()
        for name, parameter in self.named():
            self.add(name, before[name])
            self.add(f"{name}.update", parameter.detach() - before[name])
        self.step += 1


def train_whole(
    net: nn.Module | None = None, *, steps: int = STEPS, halves: int = 1, shares: int = 0, inputs: bool = False
) -> Truth:
    """In each step one pass, or several over a part of the rows each, whose gradients are added up.

    With ``shares`` also what processes find alone that have a share of the rows each: as ``….local.grad``.
    """
    net = net or make_net()
    twin = deepcopy(net)
    truth = Truth(net, inputs=inputs)
    optimizer = make_optimizer(truth.net)
    for step in range(steps):
        optimizer.zero_grad()
        twin.load_state_dict(net.state_dict())
        for share in range(shares):
            x, slope = (each.chunk(shares)[share] for each in (data_of(step), slope_of(step)))
            found = torch.autograd.grad(loss_of(twin(x), slope), list(twin.parameters()))
            for (name, _), gradient in zip(truth.named(), found, strict=True):
                truth.add(f"{name}.local.grad", gradient)
        for x, slope in zip(data_of(step).chunk(halves), slope_of(step).chunk(halves), strict=True):
            loss_of(truth.net(x), slope).backward()
        truth.take_gradients()
        truth.update(optimizer)
    return truth


def assert_merged(
    history: History,
    truth: Truth,
    *,
    factor: Callable[[str], float] = lambda site: 1.0,
    sites: Iterable[str] = (),
    is_exact: bool = True,
    cancel: Container[str] = (),
) -> None:
    """Merged numbers are those of the truth: counts, and extremes if they can be, to the bit; the others to 1e-5.

    A mean that cancels out is what it is to a part in ten million of the largest value. At the sites that ``cancel``
    single values do, and whether they are zero is a matter of rounding.
    """
    for site in sites or truth.seen:
        series = history[site]
        by_step = truth.seen[site]
        assert series.steps.tolist() == sorted(by_step), site
        for at, step in enumerate(sorted(by_step)):
            values = np.concatenate([each.flatten().double().numpy() for each in by_step[step]]) * factor(site)
            assert series.count[at] == len(values), (site, step)
            assert series.zeros[at] == (values == 0).sum() or site in cancel, (site, step)
            extremes = series.min[at], series.max[at]
            assert extremes == pytest.approx((values.min(), values.max()), rel=0 if is_exact else 1e-5, abs=0), site
            np.testing.assert_allclose(
                _moments(series, at),
                [values.mean(), values.std(), np.sqrt((values**2).sum()), np.abs(values).sum()],
                rtol=1e-5,
                atol=1e-7 * (np.abs(values).max() if is_exact else 1),
                err_msg=f"{site} step {step}",
            )


def _moments(series: Any, at: int) -> list[float]:
    return [series.mean[at], series.std[at], series.l2[at], series.l1[at]]
