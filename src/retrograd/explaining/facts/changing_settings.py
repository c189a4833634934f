"""Settings of optimizers that change, as the momentum that a schedule cycles; rates are with the updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import is_
from typing import Any

from torch.optim.optimizer import Optimizer

from retrograd.core.history.facts import MOST_OPTIMIZERS, SettingChanged
from retrograd.core.identities import IdentityDict
from retrograd.core.recording.fact_source import FactHost, FactSource

_NUMBERS = frozenset({int, float})

_OTHERS = "lr".__ne__


class ChangingSettings(FactSource):
    """Compares the settings of each update with those of the one before."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._held: IdentityDict[Optimizer, list[Any]] = IdentityDict()
        self._before: IdentityDict[Optimizer, list[dict[str, Any]]] = IdentityDict()
        self._known: dict[tuple[str, int, str], SettingChanged] = {}

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update."""
        held = [
            value for each in optimizer.param_groups for value in map(each.get, filter(_OTHERS, optimizer.defaults))
        ]
        seen, self._held[optimizer] = self._held.get(optimizer), held
        if seen is not None and len(seen) == len(held) and all(map(is_, seen, held)):  # as at nearly every update
            return
        now = [_read(group, optimizer.defaults) for group in optimizer.param_groups]
        before = self._before.get(optimizer)
        if now == before:
            return
        self._before[optimizer] = now
        for number, (then, group) in enumerate(zip(before or (), now, strict=False)):
            if then != group:
                self._compare(self.host.optimizers.find(optimizer, MOST_OPTIMIZERS), number, then, group)

    def _compare(self, name: str, number: int, then: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        was = dict(_flatten(then))
        for setting, value in _flatten(group):
            if was.get(setting, value) == value:
                continue
            first = SettingChanged(
                name=name, value=0.0, setting=setting, group=number, first=was[setting], low=was[setting],
                high=was[setting], last=was[setting],
            )  # fmt: skip
            known = self._known.get((name, number, setting), first)
            known = replace(
                known, value=known.value + 1, low=min(known.low, value), high=max(known.high, value), last=value,
                moment=self.host.now,
            )  # fmt: skip
            self._known[name, number, setting] = known
            if _is_told(known):
                self.host.note_fact(known)

    def end(self) -> None:
        """Recording ends."""
        for known in self._known.values():
            if not _is_told(known):
                self.host.note_fact(known)
        self._known.clear()


def _is_told(known: SettingChanged) -> bool:
    """Return whether it is noted at once: at 1, 2, 4, 8 … changes."""
    times = int(known.value)
    return times & (times - 1) == 0


def _read(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are numbers, or several; no tensor, which could have to be waited for."""
    return {name: value for name in defaults if _is_plain(value := group.get(name)) and name != "lr"}


def _is_plain(value: Any) -> bool:
    return type(value) in _NUMBERS or (type(value) is tuple and _NUMBERS.issuperset(map(type, value)))


def _flatten(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in group.items():
        if isinstance(value, tuple):
            yield from ((f"{name}.{place}", float(each)) for place, each in enumerate(value))
        else:
            yield name, float(value)
