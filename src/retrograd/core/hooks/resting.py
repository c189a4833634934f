"""Hooks on modules and parameters that are out of torch's tables while none of them has anything to do.

A hook that does nothing costs all the same, since torch calls a module that has any in another way: a tenth to a fifth
of a step of small layers. One on a parameter costs a call from the engine's thread.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol
from weakref import WeakSet

from retrograd.core.hooks.compiled import has_compiled_code
from retrograd.core.hooks.listeners import HookEntry, move_first


class TapSwitch(Protocol):
    """Holds whether taps have anything to do."""

    awake: bool


class Switched(Protocol):
    """A watcher, or anything else with a switch."""

    @property
    def switch(self) -> TapSwitch:
        """Asked before each call."""


class RestableTap(Protocol):
    """A tap on a module or a parameter."""

    @property
    def watchers(self) -> tuple[Switched, ...]:
        """Who watches."""

    @property
    def entries(self) -> tuple[HookEntry, ...]:
        """Its hooks."""


def add_tap(tap: RestableTap) -> None:
    """Let a tap rest, too, from now on."""
    _taps.add(tap)
    weakref.finalize(tap, forget_switches).atexit = False


def forget_switches() -> None:
    """Search for switches again: a tap has other watchers, or is gone."""
    _switches.clear()


def is_anybody_awake() -> bool:
    """Return whether any tap has anything to do."""
    if not _switches:
        _switches.update((id(each.switch), each.switch) for tap in list(_taps) for each in tap.watchers)
    return any(switch.awake for switch in list(_switches.values()))


def change_taps() -> None:
    """Wake all taps: one of them has other watchers from now on, or has gone."""
    for each in list(_resters):
        each.change()


Place = tuple[weakref.ref[dict[int, Any]], int, RestableTap]
"""A table of hooks, the number of a tap's hook in it, and that tap."""


class RestingTaps:
    """Takes the hooks of all taps out of torch's tables for a while.

    A hook is taken out only where it is the only one of its module, so that the order of hooks stays.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._found: list[Place] | None = None
        self._switches: list[TapSwitch] = []
        self._resting: list[tuple[Place, Any]] = []
        _resters.add(self)

    def rest(self) -> None:
        """Take the hooks out until :meth:`wake`, if no switch is on.

        Not in the first calls, in which the program may compile a part of the model: a graph that was compiled without
        taps would be compiled anew with them. For the same reason not where anything has been compiled. And not where
        somebody else might switch taps on meanwhile.
        """
        if self._resting:
            return
        self._calls += 1
        if self._calls <= _CALLS_BEFORE_REST or len(_resters) > 1 or has_compiled_code():
            return
        found = self._found if self._found is not None else self._find()
        for switch in self._switches:
            if switch.awake:
                return
        for place in found:
            table = place[0]()
            if table is not None and len(table) == 1:
                hook = table.pop(place[1], None)
                if hook is not None:
                    self._resting.append((place, hook))

    def _find(self) -> list[Place]:
        taps = [tap for tap in _taps if tap.watchers]
        self._switches = list({id(each.switch): each.switch for tap in taps for each in tap.watchers}.values())
        self._found = [(*tap.entries[0].place, tap) for tap in taps if len(tap.entries) == 1]
        return self._found

    def wake(self) -> None:
        """Put them back where somebody watches, before the hooks that have come meanwhile."""
        while self._resting:  # one by one, since another thread may let one rest meanwhile
            (find, number, tap), hook = self._resting.pop()
            table = find()
            if table is not None and tap.watchers:
                table[number] = hook
                if len(table) > 1:
                    move_first(table, number)

    def change(self) -> None:
        """Wake them, and look for taps anew."""
        self.wake()
        self._found = None
        self._switches.clear()  # among them whoever has this

    def remove(self) -> None:
        """Put them back for good."""
        self.change()
        _resters.discard(self)


_taps: WeakSet[RestableTap] = WeakSet()
_switches: dict[int, TapSwitch] = {}
_resters: WeakSet[RestingTaps] = WeakSet()

_CALLS_BEFORE_REST = 2
"""Calls of models in which all hooks stay."""
