"""Hooks on modules and parameters that are out of torch's tables while none of them has anything to do.

A hook that does nothing costs all the same, since torch calls a module that has any in another way: a tenth to a fifth
of a step of small layers. One on a parameter costs a call from the engine's thread.
"""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

from retrograd.core.hooks.compiled import compiled_call_listeners, has_compiled_code
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
    """Takes the hooks of taps out of torch's tables for as long as none of their switches is on.

    A hook is taken out only where it is the only one of its module, so that the order of hooks stays. Taps that have
    the same switches rest together.

    Args:
        clock: identity of the switch that may be turned on at any time, and wakes the taps that have it before; all
            others are turned on before :meth:`rest`.
    """

    def __init__(self, clock: int) -> None:
        self._clock = clock
        self._calls = 0
        self._groups: list[_Group] | None = None
        self._alarm: weakref.finalize[Any, Any] | None = None
        _resters.add(self)

    def rest(self) -> None:
        """Take the hooks out where no switch is on, and put back those where one is.

        Not in the first calls, in which the program may compile a part of the model: a graph that was compiled without
        taps would be compiled anew with them. For the same reason not where anything has been compiled, and all wake
        before that. And not where somebody else might switch taps on meanwhile.
        """
        self._calls += 1
        if self._calls <= _CALLS_BEFORE_REST:
            return
        if len(_resters) > 1 or has_compiled_code():
            self.wake_all()
            return
        if self._groups is None:
            self._groups = self._find()
        if self._alarm is None:
            alarm = _CompilingAlarm(weakref.ref(self))
            compiled_call_listeners.add(alarm)
            self._alarm = weakref.finalize(self, compiled_call_listeners.remove, alarm)
            self._alarm.atexit = False
        for group in self._groups:
            group.settle()

    def _find(self) -> list[_Group]:
        groups: dict[frozenset[int], _Group] = {}
        for tap in _taps:
            if len(tap.entries) == 1 and tap.watchers:
                switches = {id(each.switch): each.switch for each in tap.watchers}
                group = groups.setdefault(frozenset(switches), _Group(list(switches.values()), self._clock in switches))
                group.places.append((*tap.entries[0].place, tap))
        return list(groups.values())

    def wake(self) -> None:
        """Put back those of the clock: it may be turned on from now on."""
        for group in self._groups or ():
            if group.has_clock:
                group.wake()

    def wake_all(self) -> None:
        """Put all of them back."""
        for group in self._groups or ():
            group.wake()

    def change(self) -> None:
        """Wake them, and look for taps anew."""
        self.wake_all()
        self._groups = None  # which has switches, among them whoever has this

    def remove(self) -> None:
        """Put them back for good."""
        self.change()
        _resters.discard(self)
        if self._alarm is not None:
            self._alarm()


class _CompilingAlarm:
    """Wakes all taps before compiled code runs."""

    def __init__(self, find_taps: weakref.ref[RestingTaps]) -> None:
        self._find_taps = find_taps

    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        taps = self._find_taps()
        if taps is not None:
            taps.wake_all()

    def compiled_call_ends(self) -> None:
        pass


class _Group:
    """Taps that have the same switches."""

    __slots__ = ("_resting", "_switches", "has_clock", "places")

    def __init__(self, switches: list[TapSwitch], has_clock: bool) -> None:
        self.places: list[Place] = []
        self.has_clock = has_clock
        self._switches = switches
        self._resting: list[tuple[Place, Any]] = []

    def settle(self) -> None:
        """Rest, or wake, as the switches say."""
        for switch in self._switches:
            if switch.awake:
                self.wake()
                return
        if not self._resting:
            for place in self.places:
                table = place[0]()
                if table is not None and len(table) == 1:
                    hook = table.pop(place[1], None)
                    if hook is not None:
                        self._resting.append((place, hook))

    def wake(self) -> None:
        """Put the hooks back where somebody watches, before those that have come meanwhile."""
        while self._resting:  # one by one, since another thread may let one rest meanwhile
            (find, number, tap), hook = self._resting.pop()
            table = find()
            if table is not None and tap.watchers:
                table[number] = hook
                if len(table) > 1:
                    move_first(table, number)


_taps: WeakSet[RestableTap] = WeakSet()
_switches: dict[int, TapSwitch] = {}
_resters: WeakSet[RestingTaps] = WeakSet()

_CALLS_BEFORE_REST = 2
"""Calls of models in which all hooks stay."""
