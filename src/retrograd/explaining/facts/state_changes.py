"""States of optimizers, and buffers, that are not what the last update has left when the next step uses them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from retrograd.core.history.facts import MOST_OPTIMIZERS
from retrograd.core.history.weights_facts import Changed
from retrograd.core.hooks.names import walk_buffers
from retrograd.core.hooks.optimizer import held_by
from retrograd.core.identities import IdentityDict
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.core.recording.weight_changes import ChangeNotes, find_bit
from retrograd.core.statistics.slab import sum_bits

_AT_ONCE = 12
"""Tensors that are read at each update; others at the next one."""
_ELEMENTS = 1 << 14
"""Of the largest tensor that is read."""

Find = Callable[[], Tensor | None]


class Part(NamedTuple):
    """A tensor, which is not held.

    Attributes:
        find: finds it.
        name: its site, or that of the parameter whose state it is.
        of: ``buffer``, or the name of a state.
    """

    find: Find
    name: str
    of: str


class TurnTaking:
    """Takes the sums of some tensors, and compares them once; then it is the turn of the next ones."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._place = self._first = 0
        self._sums: list[int | None] = []

    def learn(self, parts: Iterator[Part]) -> None:
        """Take turns with these from now on."""
        self._parts = list(parts)

    @property
    def is_empty(self) -> bool:
        """True if there is no tensor."""
        return not self._parts

    @property
    def taken(self) -> int:
        """How many tensors have sums that are not compared yet."""
        return len(self._sums)

    def take(self) -> None:
        """Take the sums of the next tensors."""
        self._first = self._place
        self._sums = _read(self._parts[self._first : self._first + _AT_ONCE])
        self._place = self._first + _AT_ONCE if self._first + _AT_ONCE < len(self._parts) else 0

    def compare(self) -> Iterator[tuple[Part, int, int]]:
        """What has another sum than before: that, and both sums."""
        sums, self._sums = self._sums, []
        if sums:
            parts = self._parts[self._first : self._first + len(sums)]
            for part, then, now in zip(parts, sums, _read(parts), strict=True):
                if then and now and then != now:
                    yield part, then, now


def _read(parts: list[Part]) -> list[int | None]:
    found = [part.find() for part in parts]
    sums = iter(sum_bits([each for each in found if each is not None]))
    return [None if each is None else next(sums) for each in found]


class StateChanges(FactSource):
    """Records what has changed between two recorded updates, of a few tensors at a time."""

    rests = True

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._notes = ChangeNotes(host.note_fact)
        self._states: IdentityDict[Optimizer, TurnTaking] = IdentityDict()
        self._buffers = TurnTaking()
        self._has_buffers: bool | None = None
        self._since = -1
        self._step: int | None = None

    def model_added(self, name: str, model: nn.Module) -> None:
        """A model is recorded from now on."""
        self._has_buffers = None

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called: the first time behind an update its buffers are as that has left them."""
        self._tell(self._buffers, "")

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update."""
        turns = self._states.get(optimizer)
        self._step = self.host.step if self.host.is_recorded else None
        if turns is not None:
            self._tell(turns, self.host.optimizers.find(optimizer, MOST_OPTIMIZERS))

    def update_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has updated."""
        if self._step is None:
            return
        turns = self._states.get(optimizer)
        if turns is None:
            turns = self._states[optimizer] = TurnTaking()
        if turns.is_empty or self.host.is_look:
            turns.learn(self._list_states(optimizer))
        if self._has_buffers is None:
            self._buffers.learn(self._list_buffers())
            self._has_buffers = not self._buffers.is_empty
        turns.take()
        if self._has_buffers:
            self._buffers.take()
        self._since = self._step

    def end(self) -> None:
        """Forget everything."""
        self._states.clear()
        self._buffers = TurnTaking()

    def _tell(self, turns: TurnTaking, optimizer: str) -> None:
        compared = turns.taken
        changed = list(turns.compare())
        if not changed or self.host.step > self._since + 1:
            return
        part, then, now = changed[0]
        self._notes.add(
            Changed(
                name=part.name,
                value=float(len(changed)),
                moment=self.host.now,
                of=part.of,
                optimizer=optimizer,
                sites=tuple(each.name for each, _, _ in changed[:3]),
                since=self._since,
                compared=compared,
                bit=find_bit(then, now) if len(changed) == 1 else -1,
            )
        )

    def _list_states(self, optimizer: Optimizer) -> Iterator[Part]:
        for parameter in held_by(optimizer):
            name = self.host.name_parameter(parameter)
            if name is not None and parameter in optimizer.state:
                for key, value in optimizer.state[parameter].items():
                    if isinstance(value, Tensor) and 1 < value.numel() <= _ELEMENTS:
                        yield Part(weakref.ref(value), name, str(key))

    def _list_buffers(self) -> Iterator[Part]:
        found = (each for each in walk_buffers(self.host.models) if each[1].is_floating_point())
        for name, buffer in islice(found, 1 << 10):
            if 1 < buffer.numel() <= _ELEMENTS:
                yield Part(weakref.ref(buffer), name, "buffer")
