"""Empties buffers into the sink: rows, losses, scales, kept tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from retrograd.history.sink import Moment, RowBatch, Sink
from retrograd.recording.attribution import Closed, LateGradients, divide, split_late
from retrograd.recording.mode_buffer import Mode, ModeBuffer
from retrograd.recording.site_recorder import RecorderFactory
from retrograd.recording.site_table import pick_custom
from retrograd.recording.taps import Taps
from retrograd.recording.tensor_keeper import Kept
from retrograd.sites.site import ROOT, Site
from retrograd.statistics.row import ROW, scale_rows


class Emitter:
    """Hands over what is complete. Only here is a device waited for.

    Args:
        sink: where it goes.
        factory: has the numbering of rows, what takes kept tensors and events, and placements, which are told before
            the rows that they speak of.
        taps: have what counts calls: of outputs, inputs and tensors watched by hand.

    Attributes:
        failed_at: of the last pass that raised, the module whose output's gradient came last; None where none came.
    """

    def __init__(self, sink: Sink, factory: RecorderFactory, taps: Taps) -> None:
        self._sink = sink
        self._rows = factory.rows
        self._keeper = factory.keeper
        self._events = factory.events
        self._placements = factory.placements
        self._slots = taps.slots
        self._late = LateGradients(taps.calls)
        self._numbers = b""
        self._losses: list[tuple[Moment, torch.Tensor, torch.Tensor | None]] = []
        self._changes: list[tuple[Moment, Site, str, torch.Tensor]] = []
        self.failed_at: str | None = None

    def add_losses(self, moment: Moment, losses: tuple[torch.Tensor, ...], scale: torch.Tensor | None) -> None:
        """A pass that started from these losses has ended."""
        self._losses += [(moment, loss, scale) for loss in losses]

    def add_change(self, moment: Moment, site: Site, rule: str, change: torch.Tensor) -> None:
        """A rule has changed a tensor by this share of it, a scalar on any device."""
        self._changes.append((moment, site, rule, change))

    def emit(self, buffer: ModeBuffer, moment: Moment, is_closing: bool) -> None:
        """Hand over what a buffer holds.

        Args:
            buffer: the buffer.
            moment: when it was recorded, at its last pass.
            is_closing: its forward and all passes over it are done with.
        """
        kept, buffer.kept = buffer.kept, []
        scale = self._read_scale(buffer.scale, moment)
        batches = list(_drain(buffer, moment, scale))
        division = divide(buffer, self._slots, batches, is_closing=is_closing)
        if buffer.failed:
            self.failed_at = self._find_last(batches)
        late = self._late.find(buffer) if buffer.mode is Mode.GRAD else {}
        self._emit_losses()
        self._emit_changes(moment)
        self._placements.flush()
        if kept:
            for when, items in division.split_kept(moment, kept) if division else [(moment, kept)]:
                self._keep(when, items, scale, late)
        if division:
            batches = [part for batch in batches for part in division.split_rows(batch)]
        for batch in batches:
            for part in split_late(batch, late) if late else (batch,):
                self._add_rows(buffer, part)
        if is_closing and buffer.mode is Mode.GRAD:
            self._late.close(buffer, moment)

    def _add_rows(self, buffer: ModeBuffer, batch: RowBatch) -> None:
        numbers = memoryview(batch.rows).cast("i")[:: ROW.itemsize // 4].tobytes()  # ``row`` comes first in a row
        if numbers != self._numbers:  # they are nearly always those of the batch before
            self._numbers = numbers
            self._rows.mark(np.frombuffer(numbers, np.int32))
        if buffer.mode is Mode.GRAD:
            self._late.note(numbers)
        self._sink.add_rows(self._rows.translate(batch))
        if self._keeper.has_triggers:  # a user's: what it raises shall cost no row
            self._pull_triggers(batch)

    def _read_scale(self, scale: torch.Tensor | None, moment: Moment) -> float:
        if scale is None:
            return 1.0
        self._events.note("scale", value=float(scale), moment=moment)
        return float(scale)

    def _emit_losses(self) -> None:
        losses, self._losses = self._losses, []
        for moment, loss, scale in losses:
            self._events.note("loss", value=float(loss) / (1.0 if scale is None else float(scale)), moment=moment)

    def _emit_changes(self, moment: Moment) -> None:
        changes, self._changes = self._changes, []
        for device in dict.fromkeys(change.device for _, _, _, change in changes):
            here = [each for each in changes if each[3].device == device]
            shares = torch.stack([change for _, _, _, change in here]).tolist()
            for (when, site, rule, _), share in zip(here, shares, strict=True):
                if share == 0.0:  # a rule that has left all elements as they were has not intervened
                    continue
                is_of_this = (when.step, when.micro) == (moment.step, moment.micro)
                phase = moment.phase if is_of_this else when.phase  # in the forward it was not known yet
                self._events.note("rewrite", str(site), value=share, text=rule, moment=replace(when, phase=phase))

    def _keep(self, moment: Moment, kept: Sequence[Kept], scale: float, late: Mapping[Any, Closed]) -> None:
        self._rows.name_kept(item[0] for item in kept)
        if not late:
            self._keeper.take(moment, kept, scale)
            return
        self._keeper.take(moment, [item for item in kept if item[0] not in late], scale)
        for item in kept:
            closed = late.get(item[0])
            if closed is not None:
                self._keeper.take(replace(closed.moment, backward=0, phase="train"), [item], scale)

    def _find_last(self, batches: Sequence[RowBatch]) -> str | None:
        rows = [line for batch in batches for line in np.frombuffer(batch.rows, ROW)[["order", "row"]].tolist()]
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


def _drain(buffer: ModeBuffer, moment: Moment, scale: float) -> Iterator[RowBatch]:
    """Take what the slabs of a buffer hold, one batch a device."""
    custom = buffer.custom.drain() if buffer.custom is not None else {}
    for slab in buffer.slabs.values():
        rows, bins = slab.drain()
        if rows:
            batch = RowBatch(moment, rows, bins, scale, custom)
            yield pick_custom(batch) if len(buffer.slabs) > 1 else batch
