"""Taps on modules: one hook for all who watch, in a known order, that no copy of the model carries on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.hooks.module import CallTap, unwatch_forward, watch_forward
from retrograd.core.hooks.parts import is_compiled


class Switch:
    awake = True


class Watcher:
    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name
        self.switch = Switch()

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.log.append(self.name)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.log.append(f"{self.name} before {len(args)} {sorted(kwargs)}")

    def after_call(self, module: nn.Module, output: Any) -> None:
        self.log.append(f"{self.name} after {'nothing' if output is None else 'a result'}")


@pytest.fixture
def log() -> list[str]:
    return []


def call(module: nn.Module) -> Tensor:
    return module(torch.ones(1, 2))


def test_watchers_share_a_hook_and_the_last_one_takes_it_away(log: list[str]) -> None:
    module = nn.Linear(2, 2)
    first, second = Watcher(log, "first"), Watcher(log, "second")
    watch_forward(module, first)
    watch_forward(module, second)
    assert len(module._forward_hooks) == 1
    call(module)
    unwatch_forward(module, first)
    unwatch_forward(module, first)
    call(module)
    assert log == ["first", "second", "second"]
    unwatch_forward(module, second)
    assert not module._forward_hooks
    unwatch_forward(module, second)


def test_a_watcher_that_is_switched_off_is_not_told(log: list[str]) -> None:
    module = nn.Linear(2, 2)
    watcher = Watcher(log, "watcher")
    watch_forward(module, watcher)
    watcher.switch.awake = False
    call(module)
    assert log == []
    unwatch_forward(module, watcher)


def test_hooks_of_the_user_keep_their_place(log: list[str]) -> None:
    module = nn.Linear(2, 2)
    watcher = Watcher(log, "ours")
    module.register_forward_hook(lambda *_: log.append("before"))
    watch_forward(module, watcher)
    module.register_forward_hook(lambda *_: log.append("after"))
    call(module)
    unwatch_forward(module, watcher)
    call(module)
    assert log == ["before", "ours", "after", "before", "after"]


def test_a_tap_sees_positional_and_named_arguments(log: list[str]) -> None:
    module = nn.Bilinear(2, 2, 2)
    tap = CallTap(module, Watcher(log, "tap"))
    module(torch.ones(1, 2), input2=torch.ones(1, 2))
    tap.remove()
    module(torch.ones(1, 2), torch.ones(1, 2))
    assert log == ["tap before 1 ['input2']", "tap after a result"]


def test_the_outermost_tap_begins_first_and_ends_last(log: list[str]) -> None:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: log.append("user"))
    CallTap(module, Watcher(log, "inner"))
    CallTap(module, Watcher(log, "outer"), outermost=True)
    call(module)
    assert [entry.split()[0] for entry in log] == ["outer", "user", "inner", "inner", "outer"]


class Failing(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error("asked for")


def test_a_call_that_raises_ends_too(log: list[str]) -> None:
    module = Failing(ValueError)
    CallTap(module, Watcher(log, "tap"))
    with pytest.raises(ValueError, match="asked for"):
        call(module)
    assert log == ["tap before 1 []", "tap after nothing"]


def test_an_interrupt_runs_no_hook(log: list[str]) -> None:
    """Torch runs none for what is not an ``Exception``; whoever pairs the two must not count on the second."""
    module = Failing(KeyboardInterrupt)
    CallTap(module, Watcher(log, "tap"))
    with pytest.raises(KeyboardInterrupt):
        call(module)
    assert log == ["tap before 1 []"]


def test_the_second_may_come_without_the_first(log: list[str]) -> None:
    module = nn.Linear(2, 2)

    def fail(*_: Any) -> None:
        raise ValueError("asked for")

    module.register_forward_pre_hook(fail)
    CallTap(module, Watcher(log, "tap"))
    with pytest.raises(ValueError, match="asked for"):
        call(module)
    assert log == ["tap after nothing"]


def test_watchers_that_come_and_go_in_many_threads(log: list[str]) -> None:
    module = nn.Linear(2, 2)

    def work() -> None:
        for _ in range(200):
            watcher = Watcher([], "")
            watch_forward(module, watcher)
            unwatch_forward(module, watcher)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not module._forward_hooks


def test_what_is_compiled_is_known() -> None:
    module = nn.Linear(2, 2)
    assert not is_compiled(module)
    assert is_compiled(torch.compile(module, backend="eager"))
    module.compile(backend="eager")
    assert is_compiled(module)
