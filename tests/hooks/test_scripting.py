"""A model is scripted without our hooks, and keeps them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from retrograd.hooks.module import CallTap, unwatch_forward, watch_forward
from retrograd.hooks.scripting import hide_from_scripting, show_to_scripting


class Watcher:
    switch = type("Switch", (), {"awake": True})()
    calls = 0

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls += 1

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls += 1

    def after_call(self, module: nn.Module, output: Any) -> None:
        self.calls += 1


@pytest.fixture(autouse=True)
def hidden() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        hide_from_scripting()
        hide_from_scripting()
        show_to_scripting()
        yield
        show_to_scripting()


def test_it_keeps_its_hooks_in_order() -> None:
    model, watcher = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Watcher()
    watch_forward(model[0], watcher)
    tap = CallTap(model, watcher, outermost=True)
    before = [list(module._forward_hooks.items()) for module in model.modules()]
    scripted = torch.jit.script(model)
    assert [list(module._forward_hooks.items()) for module in model.modules()] == before
    scripted(torch.ones(1, 2))
    assert watcher.calls == 0
    model(torch.ones(1, 2))
    assert watcher.calls == 3
    tap.remove()
    unwatch_forward(model[0], watcher)


def test_what_cannot_be_scripted_keeps_its_hooks_too() -> None:
    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            return {**x}

    model, watcher = Odd(), Watcher()
    watch_forward(model, watcher)
    with pytest.raises(torch.jit.frontend.FrontendError):
        torch.jit.script(model)
    assert len(model._forward_hooks) == 1
    unwatch_forward(model, watcher)
