"""Events of a recording, faults of ours among them: each fault is told once, counted, and left for the manifest."""

from __future__ import annotations

import time
from collections import Counter

from retrograd.history.sink import Event, EventKind, Moment, Sink
from retrograd.notices import warn
from retrograd.recording.clock import Clock
from retrograd.sites.site import Site
from retrograd.statistics.slab import UnreadableTensorError

_MOST_WARNINGS = 5


class EventLog:
    """Hands events to a sink. A fault never stops a training step.

    A tensor of a kind that has no numbers to read is not a fault: it is not recorded, and the reason is remembered.

    Args:
        sink: where events go.

    Attributes:
        clock: says when it is.
        faults: how often something went wrong, by site, or by what was being done where no one site is to blame.
        unreadable: sites that could not be read, and why.
    """

    clock: Clock

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
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
        """Something happened once."""
        try:
            self._sink.add_event(Event(moment or self.clock.moment, kind, name, value, text, time.time()))
        except Exception as error:
            self._count("events", error)  # counted, but no event of its own

    def fault(self, where: Site | str, error: Exception) -> None:
        """An error of ours, at a site or in what was being done; training goes on."""
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
        if reason not in self._said and len(self._said) < _MOST_WARNINGS:
            self._said.add(reason)
            warn(f"retrograd could not record {site}: {reason}. Training goes on; further faults are counted.")
        return reason

    # ---- what facts ask -----------------------------------------------------------------------------------------

    @property
    def fact_step(self) -> int:
        """The step that a fact is of that is seen now."""
        return self.clock.coming

    @property
    def is_fact_recorded(self) -> bool:
        """Whether that step is recorded, as far as it is known."""
        clock = self.clock
        return clock.on and clock.coming == clock.step

    @property
    def fact_moment(self) -> Moment:
        """When a fact is of that is seen now."""
        clock = self.clock
        if clock.coming != clock.step:
            return Moment(clock.coming)
        return Moment(clock.step, clock.micro, clock.backward, clock.buffers.grad.phase)
