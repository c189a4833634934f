"""What a rank holds of others and of itself on its way into the folder, each contribution once.

How nothing is lost, and nothing counts twice:

- Each rank hands its rows over in units, the rows and losses of one step, and numbers them. It keeps a copy of each,
  up to a bound, until it is told that the unit is in a file. Nobody keeps units of others.
- Ranks on the way merge the units of a step to a parcel, which goes on, is dropped, or is written as a whole. A ledger
  is a set of units: that of a rank has what it has taken in; that of the folder is in the part files, with the rows.
- Whoever connects is told what the rank above has taken in, forgets all that it holds of others, takes its own units
  that are not among those, and tells those below the same in turn: they send again what is missing. Each such demand
  has a number, and what was sent before it is not taken.
- A parcel of units that are all in is dropped. One of which some are in, and others are not, cannot be divided: its
  sender is told again what is in, and sends the rest.
- What is in files is told downwards. When the rank that writes has died, the next one reads the ledgers of the
  folder, and begins with what is in them as with what a rank above has told.

So a unit is lost only with the process that made it, or by its bound. Where a unit that is in has had copies that
counted in a row that shows them no more, the merger is told: of those that come later none counts again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from retrograd.core.history.sink import Moment, Phase, Unit
from retrograd.core.merging.rows import LossMeans, RankedRows, RowMerger, When, count_from_end
from retrograd.core.merging.sites import SharedSites
from retrograd.core.runs.ledger import Ledger

KEEPING_BYTES = 64 << 20
"""So many of its own a rank keeps until they are in a file."""
_UNIT_BYTES = 300
_REMEMBERED = 1000
"""Steps of which it is known how many units and micro-batches they have."""

LossSum = tuple[int, int, int, Phase, int, float]
"""Step, micro-batch, pass and phase; how many losses, and their sum."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Units of one step and turn, merged.

    Attributes:
        when: the step and the turn.
        units: what is in it.
        rows: by moment.
        losses: by moment.
    """

    when: When
    units: tuple[Unit, ...]
    rows: tuple[RankedRows, ...] = ()
    losses: tuple[LossSum, ...] = ()

    @property
    def size(self) -> int:
        """Bytes."""
        return _UNIT_BYTES + sum(rows.size for rows in self.rows)

    @property
    def n_rows(self) -> int:
        """How many rows it has."""
        return sum(len(rows.owners) // 4 for rows in self.rows)


class Holdings:
    """Parcels that wait until those of all ranks below have come.

    Args:
        sites: their names, and who holds copies.
        span: the ranks whose rows come here.

    Attributes:
        merger: of the rows.
        taken: the units that have been taken in since the last reset, and those that were in before.
    """

    def __init__(self, sites: SharedSites, span: range) -> None:
        self._processes = range(sites.processes)
        self.merger = RowMerger(sites, span)
        self.taken = Ledger()
        self._units: dict[When, list[Unit]] = {}
        self._losses: dict[When, LossMeans] = {}

    def accept(self, parcel: Parcel, span: range) -> bool:
        """Take a parcel in, or drop it where it is in already; False where only a part of it is.

        Args:
            parcel: what came.
            span: the ranks below the one that it came from; what all holders of are among, it has merged.
        """
        n_new = sum(unit not in self.taken for unit in parcel.units)
        if n_new < len(parcel.units):
            return n_new == 0
        self.taken.add(parcel.units)
        self._units.setdefault(parcel.when, []).extend(parcel.units)
        for rows in parcel.rows:
            self.merger.add(rows, parcel.when[1])
        losses = self._losses.setdefault(parcel.when, LossMeans())
        for loss in parcel.losses:
            losses.add(*loss)
        if len(span) > 1:
            self.merger.count_elsewhere(parcel.when, (unit.rank for unit in parcel.units), span)
        return True

    @property
    def first_step(self) -> int | None:
        """The first step of which anything is held."""
        return min(self._units, default=(None, 0))[0]

    def take(self, before: int | None = None) -> Iterator[Parcel]:
        """Merge and take what is held of earlier steps than this one; of all where it is None."""
        for when in sorted(self._units):
            if before is None or when[0] < before:
                units, losses = self._units.pop(when), self._losses.pop(when)
                yield Parcel(when, tuple(units), tuple(self.merger.take_turn(when)), tuple(losses.take()))

    def reset(self, taken: Ledger) -> None:
        """Forget what is held, and begin with what is in already."""
        self.taken = taken.copy()
        self._units, self._losses = {}, {}
        self.merger.reset(taken.forgotten)
        for step, turn, ranks in taken.late_steps:
            self.merger.count_elsewhere((step, turn), ranks, self._processes)


class OwnUnits:
    """What a rank has recorded itself: by step until that is complete, then as units until these are in a file.

    Args:
        rank: this one.

    Attributes:
        unkept: rows of units that were not kept until they were in a file, since there were too many.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: dict[int, list[RankedRows]] = {}
        self._losses: dict[int, LossMeans] = {}
        self._turns: dict[int, int] = {}
        self._lasts: dict[int, int] = {}
        self._last: int | None = None
        self._n_units = 0
        self._kept: deque[Parcel] = deque()
        self._bytes = 0
        self.unkept = 0

    def add_rows(self, rows: RankedRows) -> None:
        """Add rows."""
        self._rows.setdefault(rows.batch.moment.step, []).append(rows)

    def add_loss(self, moment: Moment, value: float) -> None:
        """Add a loss."""
        losses = self._losses.setdefault(moment.step, LossMeans())
        losses.add(moment.step, moment.micro, moment.backward, moment.phase, 1, value)

    def add_update(self, step: int, micro: int) -> None:
        """Note an update, which ends its step: this is the last micro-batch, unless a further update follows."""
        self._last = self._lasts[step] = max(micro, self._lasts.get(step, 0))
        if len(self._lasts) > _REMEMBERED:
            del self._lasts[min(self._lasts)]

    def close(self, before: int | None = None, *, over: int | None = None) -> list[Parcel]:
        """Make units of earlier steps than this one; of all where it is None. They are kept.

        Args:
            before: which steps.
            over: earlier steps than this one are over; all where it is None. Of others more may come.
        """
        steps = sorted(step for step in self._rows.keys() | self._losses.keys() if before is None or step < before)
        return [self._make_unit(step, is_over=over is None or step < over) for step in steps]

    def _make_unit(self, step: int, *, is_over: bool) -> Parcel:
        turn = self._turns.get(step, 0)
        self._turns[step] = turn + 1
        if len(self._turns) > _REMEMBERED:
            del self._turns[min(self._turns)]
        unit = Unit(self._rank, self._n_units, step, turn)
        self._n_units += 1
        losses = self._losses.pop(step, LossMeans()).take()
        parcel = Parcel((step, turn), (unit,), tuple(self._take_rows(step, is_over=is_over)), tuple(losses))
        self._kept.append(parcel)
        self._bytes += parcel.size
        while self._bytes > KEEPING_BYTES and len(self._kept) > 1:
            self.unkept += self._drop().n_rows
        return parcel

    def _take_rows(self, step: int, *, is_over: bool) -> Iterator[RankedRows]:
        """Take the rows of a step; one whose update is to come is taken to be as long as the last one that had one.

        One that is over without an update has no end at which ranks meet: readers count from its beginning, too.
        """
        last = self._lasts.get(step, None if is_over else self._last)
        for rows in self._rows.pop(step, ()):
            yield from [rows] if last is None else count_from_end(rows, last)

    def forget(self, written: Ledger) -> None:
        """Keep no more what is in a file."""
        while self._kept and self._kept[0].units[0] in written:
            self._drop()

    def _drop(self) -> Parcel:
        parcel = self._kept.popleft()
        self._bytes -= parcel.size
        return parcel

    @property
    def kept(self) -> Sequence[Parcel]:
        """Units that are not in a file, as far as is known."""
        return tuple(self._kept)

    @property
    def waiting(self) -> int:
        """Bytes that are kept."""
        return self._bytes
