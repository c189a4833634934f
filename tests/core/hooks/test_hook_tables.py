"""A model is scripted, pickled and copied without our hooks, and keeps them."""

from __future__ import annotations

import copyreg
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from retrograd.core.hooks.listeners import enter_node, hidden_hooks
from retrograd.core.hooks.module import CallTap, unwatch_forward, watch_forward


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
        hidden_hooks.hold()
        hidden_hooks.hold()
        hidden_hooks.release()
        yield
        hidden_hooks.release()


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


def test_nothing_is_changed_for_other_dictionaries() -> None:
    model, watcher = nn.Linear(2, 2), Watcher()
    watch_forward(model, watcher)
    assert OrderedDict not in copyreg.dispatch_table
    unwatch_forward(model, watcher)


def test_a_reducer_of_somebody_else_is_asked_and_stays() -> None:
    """What it makes of a hook of ours does nothing."""
    try:
        copyreg.pickle(OrderedDict, theirs := lambda table: (dict, (list(table.items()),)))
        model, watcher = nn.Linear(2, 2), Watcher()
        watch_forward(model, watcher)
        table, other = pickle.loads(pickle.dumps([model._forward_hooks, OrderedDict(a=1)]))
        assert other == {"a": 1}
        assert [hook(None, None, None) for hook in table.values()] == [None]
        unwatch_forward(model, watcher)
        assert copyreg.dispatch_table[OrderedDict] is theirs
    finally:
        copyreg.dispatch_table.pop(OrderedDict, None)


def test_hooks_of_the_program_have_the_numbers_that_they_would_have() -> None:
    model, watcher = nn.Linear(2, 2), Watcher()
    number = RemovableHandle.next_id
    watch_forward(model, watcher)
    tap = CallTap(model, watcher)
    node = model(torch.ones(1, 2)).grad_fn
    entries = [enter_node(node.register_hook, watcher), enter_node(node.register_prehook, watcher)]
    assert RemovableHandle.next_id == number
    theirs = node.register_hook(print)
    assert [entry.number < 0 for entry in entries] == [True, True]
    assert theirs.id == number
    for each in (tap, *entries):
        each.remove()
    assert list(theirs.hooks_dict_ref()) == [number]
    unwatch_forward(model, watcher)
