from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.core.hooks.discovery import ModelDiscovery
from retrograd.core.hooks.parts import has_compiled_part

X = torch.ones(1, 2)


class Listener:
    """Notes what it is told; ``on_call`` runs at the first call."""

    def __init__(self) -> None:
        self.joined: list[tuple[nn.Module, nn.Module]] = []
        self.given: list[nn.Module] = []
        self.called: list[nn.Module] = []
        self.equipped: list[tuple[Optimizer, int]] = []
        self.updating: list[tuple[Optimizer, bool]] = []
        self.errors: list[tuple[object, str]] = []
        self.on_call: Any = None

    def module_joins(self, parent: nn.Module, child: nn.Module) -> None:
        self.joined.append((parent, child))

    def parameter_made(self, module: nn.Module) -> None:
        self.given.append(module)

    def compiled_function_called(self) -> None:
        pass

    def module_called(self, module: nn.Module) -> None:
        self.called.append(module)
        if self.on_call is not None:
            act, self.on_call = self.on_call, None
            act(module)

    def parameters_given(self, optimizer: Optimizer) -> None:
        self.equipped.append((optimizer, len(optimizer.param_groups)))

    def update_begins(self, optimizer: Optimizer, has_closure: bool) -> None:
        self.updating.append((optimizer, has_closure))

    def discovery_failed(self, about: object, error: Exception) -> None:
        self.errors.append((about, str(error)))


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def lookout(listener: Listener) -> Iterator[ModelDiscovery]:
    lookout = ModelDiscovery(listener)
    lookout.arm()
    yield lookout
    lookout.close()


def test_what_a_program_builds_and_runs_is_told(listener: Listener, lookout: ModelDiscovery) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(X).sum().backward()
    optimizer.step()
    assert listener.joined == [(net, net[0])]
    assert listener.given == [net[0]]
    assert listener.called == [net, net[0]]
    optimizer.step(lambda: 0.0)
    optimizer.step(closure=lambda: 0.0)
    optimizer.add_param_group({"params": torch.zeros(1, requires_grad=True)})
    assert listener.updating == [(optimizer, False), (optimizer, True), (optimizer, True)]
    assert listener.equipped == [(optimizer, 1), (optimizer, 2)]


def test_calls_without_grad_or_while_disarmed_are_not(listener: Listener, lookout: ModelDiscovery) -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net(X)
    lookout.disarm()
    lookout.disarm()
    assert not lookout.armed
    net(X)
    assert not listener.called
    lookout.arm()
    lookout.arm()
    net(X)
    assert listener.called == [net]


def test_pre_hooks_that_come_with_the_news_run_at_this_very_call(listener: Listener, lookout: ModelDiscovery) -> None:
    seen: list[Any] = []

    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, *, by: float) -> torch.Tensor:
            return x * by

    def attach(module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda module, args: seen.append(args))
        module.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)

    net = Scale()
    net.register_forward_pre_hook(lambda module, args: seen.append("before"))
    listener.on_call = attach
    net(X, by=2.0)
    assert seen == [(X,), ((X,), {"by": 2.0}), "before"]
    seen.clear()
    net(X, by=3.0)
    assert seen == ["before", (X,), ((X,), {"by": 3.0})]


def test_a_fault_of_the_listener_does_not_reach_the_program(listener: Listener, lookout: ModelDiscovery) -> None:
    def fail(module: nn.Module) -> None:
        raise ValueError("a fault")

    listener.on_call = fail
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    net(X)
    assert listener.errors == [(net, "a fault")]
    other(X)
    assert listener.called == [net, other]


def test_torch_does_not_warn_of_our_hook_at_a_compiled_module(listener: Listener, lookout: ModelDiscovery) -> None:
    net = torch.compile(nn.Linear(2, 2), backend="eager")
    assert has_compiled_part(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net(X)
    assert not [warning for warning in caught if "global hooks" in str(warning.message)]
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.warns(UserWarning, match="global hooks"):
            net(X)
    finally:
        handle.remove()


def test_has_compiled_part() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not has_compiled_part(net)
    net[1].compile(backend="eager")
    assert has_compiled_part(net)
