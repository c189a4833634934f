"""Values that are not what the last update has left when the next one begins, told by the sums of their bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import Optimizer

from retrograd.core.history.sink import Moment
from retrograd.core.history.weights_facts import Changed
from retrograd.core.hooks.optimizer import held_by
from retrograd.core.identities import IdentityDict
from retrograd.core.recording.keep import KeptSource

MOST = 20
"""Changes of one kind that are noted, and then those at powers of two; and single bits, whenever they are."""

NoteChange = Callable[[Changed], None]


def find_bit(before: int, after: int) -> int:
    """The power of two that the difference of two sums of words is; −1 where it is none."""
    for difference in ((after - before) % _WORD, (before - after) % _WORD):
        if difference and difference & (difference - 1) == 0:
            return difference.bit_length() - 1
    return -1


_WORD = 1 << 64


class ChangeNotes:
    """Notes what has changed, and what may be a single bit, but not each time.

    Args:
        note: takes the facts.
    """

    def __init__(self, note: NoteChange) -> None:
        self._note = note
        self._times: dict[tuple[str, str], int] = {}
        self._bits = 0

    def add(self, changed: Changed) -> None:
        """Note a change, unless there have been many."""
        key = changed.optimizer, changed.of
        times = self._times[key] = self._times.get(key, 0) + 1
        is_bit = changed.bit >= 0 and self._bits < MOST
        self._bits += is_bit
        if is_bit or times <= MOST or times & (times - 1) == 0:
            self._note(replace(changed, times=times))


class _Left(NamedTuple):
    """What an update has left: of which parameters, their sums, the step, and how many updates had been made."""

    recorders: Sequence[KeptSource]
    sums: npt.NDArray[np.uint64]
    step: int
    made: int


class WeightChanges:
    """Compares the weights before each recorded update with what the one before has left, if that was recorded too.

    Args:
        note: takes the facts.
        name: finds the name of an optimizer.
        now: finds the moment.
    """

    def __init__(self, note: NoteChange, name: Callable[[Optimizer], str], now: Callable[[], Moment]) -> None:
        self._notes = ChangeNotes(note)
        self._name, self._now = name, now
        self._left: IdentityDict[Optimizer, _Left] = IdentityDict()

    def see(
        self,
        optimizer: Optimizer,
        recorders: Sequence[KeptSource],
        parameters: Sequence[torch.Tensor],
        bits: bytearray,
        count: int,
    ) -> None:
        """An update has been measured.

        Args:
            optimizer: whose.
            recorders: what has recorded the update of each parameter.
            parameters: those that were measured.
            bits: of each the sums of its bits before and after; zeros where they are not known.
            count: how many updates this optimizer had made before.
        """
        sums = np.frombuffer(bits, np.uint64).reshape(-1, 2)
        before, left, moment = sums[:, 0], self._left.get(optimizer), self._now()
        self._left[optimizer] = _Left(recorders, sums[:, 1], moment.step, count)
        if left is None or left.made + 1 != count or left.recorders != recorders:
            return
        changed = np.flatnonzero((left.sums != before) & (left.sums != 0) & (before != 0)).tolist()
        if changed:
            others = {id(each) for other in self._left if other is not optimizer for each in held_by(other)}
            changed = [place for place in changed if id(parameters[place]) not in others]
        if changed:
            names = [str(recorders[place].site.value) for place in changed[:3]]
            first, is_one = changed[0], len(changed) == 1
            found = Changed(
                name=names[0],
                value=float(len(changed)),
                moment=moment,
                optimizer=self._name(optimizer),
                sites=tuple(names),
                since=left.step,
                compared=len(recorders),
                dtype=str(parameters[first].dtype).removeprefix("torch."),
                bit=find_bit(int(left.sums[first]), int(before[first])) if is_one else -1,
            )
            self._notes.add(found)

    def release(self) -> None:
        """Forget everything."""
        self._left.clear()
