"""States that were read and loaded, and what became of them by the next update."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.core.frames import read_locals
from retrograd.core.history.facts import MOST_OPTIMIZERS
from retrograd.core.history.sink import Moment
from retrograd.core.history.weights_facts import CountedOn, Load, StateRead
from retrograd.core.hooks.engine import grad_enabled
from retrograd.core.hooks.loads import LoadNote, ReadNote, Sums, are_equal, load_watch, log, sum_some_bits
from retrograd.core.hooks.parts import modules_of, parameters_of
from retrograd.core.hooks.torch_calls import describe_frame, program_frame
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.core.sites.site import ROOT

_LEAST = 2
"""The smallest number that a variable can be seen to count on from: a new loop begins with 0 or 1."""
_FRAMES = 30


@dataclass(slots=True)
class _Pending:
    """A load behind which no update has begun yet."""

    note: LoadNote
    step: int
    is_evaluated: bool = False
    now: Sums | None = None


def is_part(target: object, model: nn.Module) -> bool:
    """Return whether a target is a model, a part of it, or what wraps it."""
    return isinstance(target, nn.Module) and (
        any(each is target for each in modules_of(model)) or any(each is model for each in modules_of(target))
    )


Variable = tuple[str, str, str]
"""File, function and name of a variable."""


class LoadSource(FactSource):
    """Records what was read and loaded; that of before the recording when it begins."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._seen = 0
        self._pending: list[_Pending] = []
        self._done: list[_Pending] = []
        self._counters = CounterWatch(host)

    def begin(self) -> None:
        """Recording begins."""
        load_watch.hold()
        log.step = self.host.step

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called."""
        if log.count != self._seen:
            self._collect()
        trains = grad_enabled() and model.training
        if self._pending and not trains:
            for each in self._pending:
                each.is_evaluated |= is_part(each.note.target(), model)
        if trains and self._counters.is_waiting:
            self._counters.look(sys._getframe(1))

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update: what was loaded has been trained on by now, or was put back."""
        if log.count != self._seen:
            self._collect()
        if self._pending:
            for each in self._pending:
                target = each.note.target()
                if isinstance(target, nn.Module) and each.note.before is not None:
                    each.now = sum_some_bits(parameters_of(target))
            self._done += self._pending
            self._pending = []

    def update_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has updated."""
        log.step = self.host.step

    def drain(self) -> None:
        """A device may be waited for."""
        done, self._done = self._done, []
        for each in done:
            self._tell(each)

    def end(self) -> None:
        """Recording ends."""
        self._collect()
        self._done += self._pending
        self._pending = []
        self.drain()
        load_watch.release()

    def _collect(self) -> None:
        new, self._seen = log.since(self._seen), log.count
        for note in new:
            if isinstance(note, ReadNote):
                self._counters.add(note)
                self.host.note_fact(
                    StateRead(
                        name=note.name,
                        value=float(note.tensors),
                        line=note.line,
                        number=note.number,
                        parts=tuple(note.parts),
                        counters=note.counters,
                    )
                )
            else:
                self._pending.append(_Pending(note, self.host.step))

    def _tell(self, loaded: _Pending) -> None:
        note = loaded.note
        same_now = are_equal(note.after, note.before)
        fact = Load(name=self._name(note), moment=Moment(loaded.step), **note.fields)
        self.host.note_fact(
            replace(
                fact,
                changed=None if same_now is None else not same_now,
                stays=None if same_now is not False else are_equal(note.after, loaded.now),
                evaluated=loaded.is_evaluated,
            )
        )

    def _name(self, note: LoadNote) -> str:
        target = note.target()
        if isinstance(target, Optimizer):
            return self.host.optimizers.find(target, MOST_OPTIMIZERS)
        if isinstance(target, nn.Module):
            path = self.host.models.path_of(target)
            inner = vars(target).get("_modules", {}).get("module")
            if path is None and isinstance(inner, nn.Module):
                path = self.host.models.path_of(inner)
            return str(note.fields["type"]) if path is None else path or ROOT
        return str(note.fields["type"])


class CounterWatch:
    """Finds a variable of the program that counts on from a number of a file.

    Attributes:
        is_waiting: there is something to look for.
    """

    def __init__(self, host: FactHost) -> None:
        self._host = host
        self._wanted: dict[int, tuple[str, int]] = {}
        self._found: dict[Variable, tuple[int, str, int]] = {}
        self._forwards = 0
        self.is_waiting = False

    def add(self, note: ReadNote) -> None:
        """A file was read."""
        for path, value in note.counters.items():
            for start in (value, value + 1):
                if start >= _LEAST:
                    self._wanted.setdefault(start, (path, note.number))
        self.is_waiting = bool(self._wanted)

    def look(self, frame: FrameType) -> None:
        """A forward begins, called from this frame."""
        if self._wanted:
            for _, variable, value in _list_variables(frame):
                if value in self._wanted:
                    self._found[variable] = (value, *self._wanted[value])
            self._wanted.clear()
            self._forwards = 0
            self.is_waiting = bool(self._found)
            return
        self._forwards += 1
        if self._forwards & (self._forwards - 1) == 0:
            for line, variable, value in _list_variables(frame):
                if variable in self._found and value > self._found[variable][0]:
                    self._tell(line, variable)
                    return

    def _tell(self, line: str, variable: Variable) -> None:
        start, counter, file = self._found[variable]
        self._host.note_fact(CountedOn(name=variable[2], value=float(start), counter=counter, file=file, line=line))
        self._found.clear()
        self.is_waiting = False


def _list_variables(frame: FrameType) -> Iterator[tuple[str, Variable, int]]:
    """Whole numbers in the program's frames, and in the object whose method each is, with the frame's line."""
    outer: FrameType | None = frame
    for _ in range(_FRAMES):
        if outer is None:
            return
        each = program_frame(outer)
        code, variables = each.f_code, read_locals(each)
        owner = variables.get("self")
        attributes = getattr(owner, "__dict__", {}) if not isinstance(owner, nn.Module) else {}
        for prefix, some in (("", variables), ("self.", attributes)):
            for name, value in list(some.items()):
                if type(value) is int:
                    yield describe_frame(each), (code.co_filename, code.co_name, f"{prefix}{name}"), value
        outer = each.f_back
