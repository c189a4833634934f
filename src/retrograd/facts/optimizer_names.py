"""Optimizers: what they are called, and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import Optimizer

from retrograd.facts.source import FactHost
from retrograd.history.facts import OptimizerMade
from retrograd.hooks.discovery import constructed_optimizers, construction_line

_MOST = 50
"""Optimizers of one class that are noted one by one."""

_PLAIN = (bool, int, float, str, type(None))


class OptimizerNames:
    """Names optimizers in the order in which they are met; notes each at its first update, and when groups change."""

    def __init__(self, host: FactHost) -> None:
        self._host = host
        self._names: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._groups: WeakKeyDictionary[Optimizer, tuple[int, ...]] = WeakKeyDictionary()
        self._crowd: WeakSet[Optimizer] = WeakSet()
        self._counts: Counter[str] = Counter()

    def find(self, optimizer: Optimizer) -> str:
        """``SGD#1``; those of a class after the 50th have the name of that one."""
        name = self._names.get(optimizer)
        if name is None:
            kind = type(optimizer).__name__
            if self._counts[kind] == _MOST:
                self._crowd.add(optimizer)
            else:
                self._counts[kind] += 1
            name = self._names[optimizer] = f"{kind}#{self._counts[kind]}"
        return name

    def see(self, optimizer: Optimizer) -> None:
        """It is about to update."""
        groups = tuple([len(group["params"]) for group in optimizer.param_groups])
        if self._groups.get(optimizer) != groups:
            self._groups[optimizer] = groups
            self._note(optimizer)

    def end(self) -> None:
        """Recording ends: note those that hold parameters of the recorded models and have never updated."""
        for optimizer in constructed_optimizers():
            if optimizer not in self._groups and any(
                self._host.name_parameter(parameter)
                for group in optimizer.param_groups
                for parameter in group["params"]
            ):
                self._note(optimizer, has_updated=False)

    def _note(self, optimizer: Optimizer, *, has_updated: bool = True) -> None:
        name = self.find(optimizer)
        if optimizer in self._crowd:
            return
        self._host.note_fact(
            OptimizerMade(
                name=name,
                value=sum(len(group["params"]) for group in optimizer.param_groups),
                line=construction_line(optimizer),
                groups=tuple(self._describe(group) for group in optimizer.param_groups),
                has_updated=has_updated,
            )
        )

    def _describe(self, group: Mapping[str, Any]) -> dict[str, Any]:
        names = [self._host.name_parameter(parameter) for parameter in group["params"]]
        known = [name for name in names if name is not None]
        settings = {name: _plain(value) for name, value in group.items() if name != "params" and _is_plain(value)}
        return settings | {"parameters": known, "unknown": len(names) - len(known)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, torch.Tensor) else value
