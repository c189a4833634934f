"""Empties buffers into the sink: rows, losses, scales, kept tensors, each under the step and phase that it belongs to.

Where a model was called several times in a micro-batch, the rows of evaluations are taken apart: what an evaluation
recorded and what training did are each numbered from 1 again, as if the other had not been there.

Some gradients come after the micro-batch of their forward was closed: a generator runs before the critic's update, and
its gradient comes after it, when the critic's next forward has begun a new step. Such a gradient is recorded under the
step and micro-batch of its own forward, where its activation is. Its recorder tells: nothing has been seen there since.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from retrograd.core.history.sink import Moment, RowBatch, Sink
from retrograd.core.limits import LIMITS
from retrograd.core.recording.deliveries import Arrays, Deliveries
from retrograd.core.recording.keep import Kept, KeptSource
from retrograd.core.recording.mode_buffer import Forward, Mode, ModeBuffer
from retrograd.core.recording.module_watch import SiteRecorders, SlotCalls, SlotWatch
from retrograd.core.recording.scalar_watch import ScalarWatch
from retrograd.core.recording.sink_log import rename_rows
from retrograd.core.recording.site_recorder import RecorderFactory, TensorRecorder
from retrograd.core.recording.taps import Taps
from retrograd.core.sites.site import ROOT, Site
from retrograd.core.statistics.row import ROW, scale_rows
from retrograd.core.statistics.slab import Taken, take


class Emitter:
    """Hands over what is complete. Nothing waits for a device here but what keeps tensors under a scale, and triggers.

    Args:
        sink: where it goes.
        factory: has the numbering of rows, what takes kept tensors and events, and placements, which are told before
            the rows that they speak of.
        taps: have what counts calls: of outputs, inputs and tensors watched by hand.
        scalars: adds up updates.
        deliveries: bring numbers from devices.

    Attributes:
        failed_at: of the last pass that raised, the module whose output's gradient came last; None where none came.
    """

    def __init__(
        self, sink: Sink, factory: RecorderFactory, taps: Taps, scalars: ScalarWatch, deliveries: Deliveries
    ) -> None:
        self._sink = sink
        self._rows = factory.rows
        self._keeper = factory.keeper
        self._events = factory.events
        self._placements = factory.placements
        self._slots = taps.slots
        self._scalars = scalars
        self._deliveries = deliveries
        self._late = LateGradients(taps.calls)
        self._numbers = b""
        self._losses: list[tuple[Moment, torch.Tensor, torch.Tensor | None]] = []
        self._changes: list[tuple[Moment, Site, str, torch.Tensor]] = []
        self.failed_at: str | None = None

    def add_losses(self, moment: Moment, losses: tuple[torch.Tensor, ...], scale: torch.Tensor | None) -> None:
        """Record the losses from which a pass has started that has ended now."""
        self._losses += [(moment, loss, scale) for loss in losses]

    def add_change(self, moment: Moment, site: Site, rule: str, change: torch.Tensor) -> None:
        """Record that a rule has changed a tensor by this share of it, a scalar on any device."""
        self._changes.append((moment, site, rule, change))

    def emit(self, buffer: ModeBuffer, moment: Moment, is_closing: bool) -> None:
        """Hand over what a buffer holds: to whom is decided now, and rows follow when their numbers have come.

        Args:
            buffer: the buffer.
            moment: when it was recorded, at its last pass.
            is_closing: its forward and all passes over it are done with.
        """
        kept, buffer.kept = buffer.kept, []
        taken = [each for each in map(take, buffer.slabs.values()) if len(each.table)]
        division = divide(buffer, self._slots, [each.table["row"] for each in taken], is_closing=is_closing)
        if buffer.failed:
            self.failed_at = self._find_last(taken)
        late = self._late.find(buffer) if buffer.mode is Mode.GRAD else {}
        self.emit_losses()
        self._emit_changes(moment)
        self._placements.flush()
        if kept:
            scale = 1.0 if buffer.scale is None else float(buffer.scale)
            for when, items in division.split_kept(moment, kept) if division else [(moment, kept)]:
                self._keep(when, items, scale, late)
        shares: list[list[Share]] = []
        for each in taken:
            found: Iterable[Share] = [Share(moment, each.table["row"])]
            if division:
                found = division.split(moment, each.table["row"])
            if late:
                found = [part for share in found for part in split_late(share, late)]
            shares.append(list(found))
        self._send(buffer, moment, taken, shares)
        if is_closing and buffer.mode is Mode.GRAD:
            self._late.close(buffer, moment)

    def _send(self, buffer: ModeBuffer, moment: Moment, taken: Sequence[Taken], shares: list[list[Share]]) -> None:
        """Send for the numbers of rows, which are handed over when these have come."""
        custom = buffer.custom.take() if buffer.custom is not None else None
        is_trained = buffer.mode is Mode.GRAD
        for share in chain.from_iterable(shares):
            self._mark(share, is_trained=is_trained)
        scale = [] if buffer.scale is None else [buffer.scale]
        far = [each.numbers for each in taken if each.numbers is not None]
        tensors = [*scale, *far, *(custom[0] if custom else ())]

        def hand_on(arrays: Arrays) -> None:
            value = 1.0
            if scale:
                value = float(arrays[0])
                self._events.note("scale", value=value, moment=moment)
            came = iter(arrays[len(scale) : len(scale) + len(far)])
            values = custom[1](arrays[len(scale) + len(far) :]) if custom else {}
            for each, parts in zip(taken, shares, strict=True):
                rows, bins = each.finish() if each.numbers is None else each.finish(next(came))
                for share in parts:
                    batch = take_rows(RowBatch(moment, rows, bins, value, values), share, picks=len(taken) > 1)
                    self._add_rows(batch, share, is_trained=is_trained)

        self._deliveries.add(tensors, hand_on)
        if self._keeper.has_triggers and self._deliveries:  # what is kept by them is of this very step
            self._deliveries.deliver(wait=True)

    def _mark(self, share: Share, *, is_trained: bool) -> None:
        numbers = share.numbers.tobytes()
        if numbers != self._numbers:  # they are nearly always those of the batch before
            self._numbers = numbers
            self._rows.mark(share.numbers)
        if is_trained:
            self._late.note(numbers)

    def _add_rows(self, batch: RowBatch, share: Share, *, is_trained: bool) -> None:
        if is_trained:
            self._scalars.see_rows(batch, share.numbers.tobytes(), self._rows.sites)
        self._sink.add_rows(self._rows.translate(batch))
        if self._keeper.has_triggers:  # a user's: what it raises shall cost no row
            self._pull_triggers(batch)

    def emit_losses(self) -> None:
        """Hand over losses."""
        losses, self._losses = self._losses, []
        if losses:
            numbers = [each for _, loss, scale in losses for each in (loss, 1.0 if scale is None else scale)]
            self._deliveries.add_numbers(numbers, partial(self._note_losses, [moment for moment, _, _ in losses]))

    def _note_losses(self, moments: Sequence[Moment], numbers: Sequence[float]) -> None:
        for moment, loss, scale in zip(moments, numbers[::2], numbers[1::2], strict=True):
            self._events.note("loss", value=loss / scale, moment=moment)

    def _emit_changes(self, moment: Moment) -> None:
        changes, self._changes = self._changes, []
        noted = []
        for when, site, rule, _ in changes:
            is_of_this = (when.step, when.micro) == (moment.step, moment.micro)
            phase = moment.phase if is_of_this else when.phase  # in the forward it was not known yet
            noted.append((replace(when, phase=phase), str(site), rule))
        for device in dict.fromkeys(change.device for _, _, _, change in changes):
            places = [place for place, each in enumerate(changes) if each[3].device == device]
            together = torch.stack([changes[place][3] for place in places])
            self._deliveries.add([together], partial(self._note_changes, [noted[place] for place in places]))

    def _note_changes(self, noted: Sequence[tuple[Moment, str, str]], arrays: Arrays) -> None:
        for (moment, site, rule), share in zip(noted, arrays[0].tolist(), strict=True):
            if share != 0.0:  # a rule that has left all elements as they were has not intervened
                self._events.note("rewrite", site, value=share, text=rule, moment=moment)

    def _keep(self, moment: Moment, kept: Sequence[Kept], scale: float, late: Mapping[Any, Closed]) -> None:
        self._rows.name_kept(kept)
        if not late:
            self._keeper.take(moment, kept, scale)
            return
        self._keeper.take(moment, [item for item in kept if item[0] not in late], scale)
        for item in kept:
            closed = late.get(item[0])
            if closed is not None:
                self._keeper.take(replace(closed.moment, backward=0, phase="train"), [item], scale)

    def _find_last(self, taken: Sequence[Taken]) -> str | None:
        rows = [line for each in taken for line in each.table[["order", "row"]].tolist()]
        sites = [self._rows.sites[row] for _, row in sorted(rows, reverse=True)]
        last = None
        for path in [site.path for site in sites if site.quantity == "grad" and site.slot == "output"]:
            if last not in (None, ROOT) and not path.startswith(f"{last}."):
                break
            last = path  # of a module that returned the very tensor of its part, the part
        return last

    def _pull_triggers(self, batch: RowBatch) -> None:
        table = np.frombuffer(batch.rows, ROW)
        columns = {name: table[name] for name in ROW.names or ()}
        sites = [self._rows.sites[row] for row in table["row"]]
        is_gradient = np.array([site.quantity == "grad" for site in sites], dtype=bool)
        scale_rows(columns, np.where(is_gradient, 1.0 / batch.scale, 1.0))
        self._keeper.pull_triggers(batch.moment, [self._rows.names[row] for row in table["row"]], columns)


Rows = npt.NDArray[np.int32]


@dataclass(slots=True)
class Share:
    """Rows that belong together, of those that a slab held.

    Attributes:
        moment: when they were recorded.
        numbers: of these rows, as they are called.
        chosen: which they are; None for all.
        were: what they were called; None where that is the same.
    """

    moment: Moment
    numbers: Rows
    chosen: npt.NDArray[np.bool_] | None = None
    were: Rows | None = None

    def pick(self, chosen: npt.NDArray[np.bool_], moment: Moment) -> Share:
        """Some of them, with another moment."""
        if self.chosen is None:
            among = chosen
        else:
            among = self.chosen.copy()
            among[self.chosen] = chosen
        return Share(moment, self.numbers[chosen], among, None if self.were is None else self.were[chosen])


@dataclass
class Division:
    """Assigns rows to their owners, and names them accordingly.

    Attributes:
        owners: for each row the evaluation that it belongs to.
        rows: rows that get another number, and which.
        tensor_recorders: the same of those of tensors.
    """

    owners: dict[int, Forward] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    tensor_recorders: dict[KeptSource, tuple[Forward | None, TensorRecorder]] = field(default_factory=dict)

    def add(self, owner: Forward | None, tensor_recorder: TensorRecorder | None, target: TensorRecorder | None) -> None:
        """Record that what came of one recorder is this forward's, and is called as that of ``target``."""
        if tensor_recorder is None or target is None:
            return
        self.tensor_recorders[tensor_recorder] = owner, target
        if tensor_recorder.row >= 0:
            self.rows[tensor_recorder.row] = target.row
            if owner is not None:
                self.owners[tensor_recorder.row] = owner

    def split(self, moment: Moment, numbers: Rows) -> Iterator[Share]:
        """The rows of training, and those of each evaluation."""
        listed = numbers.tolist()
        owners = [self.owners.get(number) for number in listed]
        named = np.array([self.rows.get(number, number) for number in listed], np.int32)
        for owner in dict.fromkeys(owners):
            chosen = np.array([each is owner for each in owners], dtype=bool)
            yield Share(_find_moment(moment, owner), named[chosen], chosen, numbers[chosen])

    def split_kept(self, moment: Moment, kept: Sequence[Kept]) -> Iterator[tuple[Moment, list[Kept]]]:
        """The kept tensors of training, and those of each evaluation, with their moments."""
        by_owner: dict[Forward | None, list[Kept]] = {}
        for source, tensor, version, size in kept:
            owner, target = self.tensor_recorders.get(source, (None, source))
            by_owner.setdefault(owner, []).append((target, tensor, version, size))
        for owner, items in by_owner.items():
            yield _find_moment(moment, owner), items


def divide(
    buffer: ModeBuffer, slots: Sequence[SlotWatch], numbers: Sequence[Rows], *, is_closing: bool
) -> Division | None:
    """Separate evaluations from training in what was just taken from a buffer; None where all is of one kind.

    Args:
        buffer: where it was recorded.
        slots: the watches of outputs, inputs and tensors watched by hand.
        numbers: of the rows of each slab.
        is_closing: no further pass is waited for.
    """
    if len(buffer.forwards) < 2 or buffer.failed:
        return None
    calls = [_find_calls(slot, buffer) for slot in slots]
    rows = {number for of_slab in numbers for number in of_slab.tolist()}
    trained = {
        buffer.forwards.find(number, call)
        for number, of_slot in enumerate(calls)
        for call, recorders in enumerate(of_slot)
        if _has_gradient(recorders, rows)
    }
    if not buffer.forwards.decide(trained, is_reached=buffer.reached, is_closing=is_closing):
        return None
    division = Division()
    for number, slot in enumerate(slots):
        _divide_slot(division, number, slot, calls[number], buffer)
    return division


def _divide_slot(
    division: Division, number: int, slot: SlotWatch, calls: Sequence[SiteRecorders], buffer: ModeBuffer
) -> None:
    used: Counter[Forward | None] = Counter()
    for call, recorders in enumerate(calls):
        forward = buffer.forwards[buffer.forwards.find(number, call)]
        owner = forward if forward.is_evaluation else None
        for keys, recorder in list(recorders.items()):
            target = slot.find_site_recorder(buffer, used[owner], keys)
            if recorder is not None and target is not None:
                division.add(owner, recorder.value, target.value)
                division.add(owner, recorder.gradient, target.gradient)
        used[owner] += 1


def _find_calls(slot: SlotWatch, buffer: ModeBuffer) -> list[SiteRecorders]:
    calls = slot.trained_calls
    return calls.recorders[: calls.count] if calls.serial == buffer.serial else []


def _has_gradient(recorders: SiteRecorders, rows: set[int]) -> bool:
    tensor_recorders = (recorder.gradient for recorder in recorders.values() if recorder is not None)
    return any(tensor_recorder is not None and tensor_recorder.row in rows for tensor_recorder in tensor_recorders)


def _find_moment(moment: Moment, owner: Forward | None) -> Moment:
    return moment if owner is None else replace(moment, phase=owner.phase)


@dataclass(slots=True)
class Closed:
    """A micro-batch that was closed.

    Attributes:
        first, last: the serials of its buffer.
        moment: when it was, at its last pass.
        rows: those that were recorded then, as the bytes of int32.
    """

    first: int
    last: int
    moment: Moment
    rows: bytes

    def place(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of these rows have been recorded before, so that this is another pass over them."""
        again = np.isin(rows, np.frombuffer(self.rows, np.int32))
        if again.any():
            self.moment = replace(self.moment, backward=self.moment.backward + 1)
        self.rows += rows.astype(np.int32).tobytes()
        return again


_serial = attrgetter("serial")


class LateGradients:
    """Finds gradients that come late.

    Args:
        calls: those of every slot, whose tensors have been hooked; the list grows.
    """

    def __init__(self, calls: Sequence[SlotCalls]) -> None:
        self._calls = calls
        self._open: list[bytes] = []
        self._closed: deque[Closed] = deque(maxlen=LIMITS.closed_batches)

    def note(self, rows: bytes) -> None:
        """Record rows, as the bytes of int32, that were recorded for the micro-batch that is open."""
        self._open.append(rows)

    def close(self, buffer: ModeBuffer, moment: Moment) -> None:
        """Close that micro-batch."""
        self._closed.append(Closed(buffer.opened, buffer.serial, moment, b"".join(self._open)))
        self._open.clear()

    def find(self, buffer: ModeBuffer) -> dict[TensorRecorder, Closed]:
        """The recorders whose tensors, if any came since the buffer was opened, are of an earlier micro-batch."""
        late: dict[TensorRecorder, Closed] = {}
        opened = buffer.opened
        if min(map(_serial, self._calls), default=opened) >= opened:  # all have been called since, as nearly always
            return late
        for calls in self._calls:
            serial = calls.serial
            if serial < opened:
                closed = next((each for each in self._closed if each.first <= serial <= each.last), None)
                if closed is not None:
                    late.update((tensor_recorder, closed) for tensor_recorder in calls.gradients())
        return late


def split_late(share: Share, late: Mapping[TensorRecorder, Closed]) -> Iterator[Share]:
    """Split rows into those of now and those that are late, which have moments of their own."""
    numbers = share.numbers
    closed_of = {tensor_recorder.row: closed for tensor_recorder, closed in late.items()}
    is_late = np.isin(numbers, list(closed_of))
    if not is_late.all():
        yield share.pick(~is_late, share.moment) if is_late.any() else share
    for closed in {id(each): each for each in closed_of.values()}.values():
        mine = is_late & np.array([closed_of.get(number) is closed for number in numbers.tolist()], dtype=bool)
        if not mine.any():
            continue
        again = np.zeros(len(numbers), dtype=bool)
        again[mine] = closed.place(numbers[mine])
        for chosen, backward in ((mine & ~again, 0), (again, closed.moment.backward)):
            if chosen.any():
                yield share.pick(chosen, replace(closed.moment, backward=backward, phase="train"))


def take_rows(batch: RowBatch, share: Share, *, picks: bool) -> RowBatch:
    """The share of a batch.

    Args:
        batch: all rows of a slab.
        share: which of them.
        picks: users' statistics are of several slabs.
    """
    if share.chosen is None and not picks:  # as nearly always
        return batch
    table, bins = np.frombuffer(batch.rows, ROW), batch.bins
    if share.chosen is not None and not share.chosen.all():
        bins = np.frombuffer(bins, np.int64)[np.repeat(share.chosen, table["bins"])].tobytes()
        table, picks = table[share.chosen], True
    custom = _pick_custom(batch, table["row"]) if picks and batch.custom else batch.custom
    batch = replace(batch, moment=share.moment, rows=table.tobytes(), bins=bins, custom=custom)
    if share.were is None:
        return batch
    return rename_rows(batch, dict(zip(share.were.tolist(), share.numbers.tolist(), strict=True)))


def _pick_custom(batch: RowBatch, numbers: Rows) -> dict[str, tuple[Sequence[int], Sequence[float]]]:
    """Users' statistics of some rows."""
    rows = set(numbers.tolist())
    custom: dict[str, tuple[Sequence[int], Sequence[float]]] = {}
    for name, (of, values) in batch.custom.items():
        pairs = [(number, value) for number, value in zip(of, values, strict=True) if number in rows]
        custom[name] = ([number for number, _ in pairs], [value for _, value in pairs])
    return custom
