"""Sends a sink the events, of sites, and of their placements.

Faults of ours are events, too: each is told once, counted, and left for the manifest.

A sink gets a module's second and further calls only when they have rows or kept tensors: until a backward pass
has come nobody knows whether a call is one of them, or the first one of an evaluation. So its numbers may not be ours.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from retrograd.core.history.fact import Fact
from retrograd.core.history.sink import Event, EventKind, Moment, RowBatch, Sink
from retrograd.core.limits import LIMITS
from retrograd.core.notices import warn_of_fault
from retrograd.core.ranks.placements import (
    Placement,
    PlainPlacements,
    find_tensor_parallel_ranks,
    is_sharded,
    place_copies,
    place_own,
    place_spread,
)
from retrograd.core.ranks.processes import has_other_processes
from retrograd.core.recording.clock import Clock
from retrograd.core.recording.keep import Kept, KeptSource, sources_of
from retrograd.core.recording.mode_buffer import ModeBuffers
from retrograd.core.sites.site import LOCAL, Site, local_gradient
from retrograd.core.statistics.row import ROW
from retrograd.core.statistics.slab import UnreadableTensorError


class EventListener(Protocol):
    """Hears of events as they come."""

    def hear(self, event: Event) -> None:
        """An event was noted."""


class EventLog:
    """Hands events to a sink. A fault never stops a training step.

    A tensor of a kind that has no numbers to read is not a fault: it is not recorded, and the reason is remembered.

    Args:
        sink: where events go.

    Attributes:
        clock: says when it is.
        listener: who hears of events as they come, in the thread in which they do; None for nobody.
        budget: hears of them, too.
        faults: how often something went wrong, by site, or by what was being done where no one site is to blame.
        unreadable: sites that could not be read, and why.
    """

    clock: Clock

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.listener: EventListener | None = None
        self.budget: EventListener | None = None
        self.faults: Counter[str] = Counter()
        self.unreadable: dict[str, str] = {}
        self._said: set[str] = set()

    def note(
        self,
        kind: EventKind,
        name: str = "",
        *,
        value: float = float("nan"),
        text: str = "",
        moment: Moment | None = None,
    ) -> None:
        """Record an event that happens once."""
        try:
            event = Event(moment or self.clock.moment, kind, name, value, text, time.time())
            self._sink.add_event(event)
            for listener in (self.listener, self.budget):
                if listener is not None:
                    listener.hear(event)
        except Exception as error:
            self._count("events", error)  # counted, but no event of its own

    def note_fact(self, fact: Fact) -> None:
        """Record a fact that says when it was."""
        self.note(fact.kind, fact.name, value=fact.value, text=fact.text, moment=fact.moment)

    def fault(self, where: Site | str, error: Exception) -> None:
        """Record an error of ours, at a site or in what was being done; training goes on."""
        reason = self._count(where, error)
        if reason:
            self.note("fault", str(where), text=reason)

    def _count(self, where: Site | str, error: Exception) -> str:
        """Count an error; returns what it says if it is the first of its site, else an empty text.

        An error that was said of one site is not said again of another.
        """
        site = str(where)
        if isinstance(where, Site) and isinstance(error, UnreadableTensorError):
            self.unreadable.setdefault(site, str(error))
            return ""
        self.faults[site] += 1
        if self.faults[site] > 1:
            return ""
        reason = f"{type(error).__name__}: {error}"
        if reason not in self._said and len(self._said) < LIMITS.fault_warnings:
            self._said.add(reason)
            warn_of_fault(f"record {site}", error, "Training goes on; further faults are counted.")
        return reason

    # ---- what facts ask -----------------------------------------------------------------------------------------

    @property
    def fact_step(self) -> int:
        """Number of the step that a fact belongs to if it is seen now."""
        return self.clock.coming

    @property
    def is_fact_recorded(self) -> bool:
        """True if that step is recorded, as far as it is known."""
        clock = self.clock
        return clock.on and not clock.is_over

    @property
    def fact_moment(self) -> Moment:
        """The moment that a fact belongs to if it is seen now."""
        clock = self.clock
        if clock.coming != clock.step:
            return Moment(clock.coming)
        return Moment(clock.step, clock.micro, clock.backward, clock.buffers.grad.phase)


def rename_rows(batch: RowBatch, numbers: Mapping[int, int]) -> RowBatch:
    """A batch whose rows have other numbers; those that are not named keep theirs."""
    table = np.frombuffer(batch.rows, ROW).copy()
    table["row"] = [numbers.get(row, row) for row in table["row"].tolist()]
    custom: dict[str, Any] = {}
    for name, (rows, values) in batch.custom.items():
        custom[name] = ([numbers.get(row, row) for row in rows], values)
    return replace(batch, rows=table.tobytes(), custom=custom)


class RowTable:
    """Numbers sites in the order in which they come up.

    Attributes:
        sites: sites by number.
        names: their printed names.
    """

    def __init__(self, buffers: ModeBuffers, sink: Sink) -> None:
        self._buffers = buffers
        self._sink = sink
        self._numbers: dict[Site, int] = {}
        self._seen = np.zeros(0, dtype=bool)
        self._told: dict[int, int] = {}
        self._kept: set[KeptSource] = set()
        self._is_translated = False
        self._adding = threading.RLock()  # a model may run in several threads
        self.sites: list[Site] = []
        self.names: list[str] = []

    def number(self, site: Site) -> int:
        """The row of a site, a new one if it has none."""
        row = self._numbers.get(site)
        return self._add(site) if row is None else row

    def _add(self, site: Site) -> int:
        with self._adding:
            row = self._numbers.get(site)
            if row is not None:
                return row
            row = self._buffers.add_row()
            self.sites.append(site)
            self.names.append(str(site))
            if site.call == 1:
                self._tell(row)
            self._numbers[site] = row  # last: who finds it finds all of it
            return row

    def translate(self, batch: RowBatch) -> RowBatch:
        """A batch by the numbers of the sink, which is sent the sites that it does not know yet."""
        if len(self._told) < len(self.sites):
            for row in np.frombuffer(batch.rows, ROW)["row"].tolist():
                self._tell(row)
        return rename_rows(batch, self._told) if self._is_translated else batch

    def name_kept(self, kept: Sequence[Kept]) -> None:
        """Send the sink the sites of which tensors are kept, if it does not know them yet."""
        if self._kept >= sources_of(kept):
            return
        for source, *_ in kept:
            if source not in self._kept:
                self._kept.add(source)
                self._tell(self.number(source.site))

    def _tell(self, row: int) -> None:
        """Send the sink a row's site, if it does not know it yet."""
        with self._adding:
            if row not in self._told:
                self._is_translated |= row != len(self._told)
                self._told[row] = len(self._told)
                self._sink.add_sites([self.names[row]])

    def mark(self, rows: npt.NDArray[Any]) -> None:
        """Record that rows have been recorded."""
        if len(self._seen) < len(self.sites):
            self._seen = np.concatenate([self._seen, np.zeros(len(self.sites) - len(self._seen), dtype=bool)])
        self._seen[rows] = True

    @property
    def recorded(self) -> list[Site]:
        """Sites of which something has been recorded."""
        return [self.sites[row] for row in np.flatnonzero(self._seen)]


class SitePlacements:
    """Finds the placement of each site when its first tensor is seen, and tells all of them in one go.

    Where there is one process alone nothing is found, and nothing told.

    Args:
        sink: receives all of them, the stages of models by name and placements by printed site, whenever there are new
            ones.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._found: dict[Site, Placement] = {}
        self._stages: dict[str, int] = {}
        self._is_told = True
        self._plain = PlainPlacements(())

    def add_model(self, model: nn.Module) -> None:
        """Find the tensor-parallel ranks of a model that is recorded from now on."""
        if has_other_processes():
            self._plain = PlainPlacements(self._plain.ranks or find_tensor_parallel_ranks(model))

    def see(self, site: Site, tensor: Tensor) -> None:
        """Record the placement of an activation at its first call; its gradient is taken to lie as it does."""
        if has_other_processes() and not is_sharded(tensor):  # of the others each tensor tells itself
            placement = self._place_plain(tensor)
            if placement is not None:
                self._add(site.value, placement)
                self._add(site.grad, placement)

    def see_spread(self, site: Site, tensor: Tensor) -> None:
        """Record the placement of a ``DTensor`` that is recorded for the first time."""
        self._add(site, place_spread(tensor))

    def see_parameter(self, site: Site, parameter: Tensor, copies: tuple[int, ...]) -> None:
        """Record the placement of a parameter, which a wrapper may keep the same in these processes."""
        if not has_other_processes():
            return
        beside = self._plain.ranks
        placement = place_spread(parameter, beside) if is_sharded(parameter) else place_copies({*copies, *beside})
        for each in (site, site.grad, site.update):
            self._add(each, placement)
        self._add(local_gradient(site), place_copies(beside))

    def _place_plain(self, tensor: Tensor) -> Placement | None:
        return self._plain.place(tensor) if self._plain.ranks else place_own()

    def see_data(self, arguments: Any) -> None:
        """Record what a model is called with."""
        self._plain.see_data(arguments)

    @property
    def summands(self) -> list[Site]:
        """Sites of activations, and of their gradients, of which each process has an addend."""
        return [
            site
            for site, each in self._found.items()
            if each.holds == "summand" and site.slot in ("output", "input") and site.keys[-1:] != (LOCAL,)
        ]

    def set_stage(self, model: str, stage: int) -> None:
        """Record that the model of this name is a stage of a pipeline."""
        if self._stages.get(model) != stage:
            self._stages[model] = stage
            self._is_told = False

    def flush(self) -> None:
        """Send what is new."""
        if not self._is_told:
            self._is_told = True
            sites = {str(site): _describe(placement) for site, placement in self._found.items()}
            self._sink.describe(placements={"stages": dict(self._stages), "sites": sites})
            if self._plain.ranks or self._stages:
                self._sink.describe(split={"ranks": list(self._plain.ranks), "stages": dict(self._stages)})

    def _add(self, site: Site, placement: Placement) -> None:
        if self._found.get(site) != placement:
            self._found[site] = placement
            self._is_told = False


def _describe(placement: Placement) -> dict[str, Any]:
    spec = {"placements": placement.spec} if placement.spec else {}
    return {"holds": placement.holds, "ranks": list(placement.ranks), **spec}
