"""Critical findings, told at once: it may be long until the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from retrograd.core.foreign.text import show_plainly
from retrograd.core.history.facts import NonFinite, OptimizerMade, read_facts
from retrograd.core.history.sink import Event
from retrograd.core.notices import say, warnings_kept
from retrograd.core.randomness import random_kept
from retrograd.core.recording.sink_log import EventLog

if TYPE_CHECKING:
    from retrograd.core.runs.findings import Finding

FIRST = 20
"""Losses that later ones are held against."""

DIVERGED = 1000.0
"""How many times the largest of them is divergence; measured by us: no healthy run of ours comes near."""


LASTING = 5
"""Losses one after the other that must be so large: one alone may be a spike that training gets over."""


class LiveFindings:
    """Hears of events, tells what is critical, and notes it as an event of kind ``finding``; of each detector once.

    Args:
        events: of which it hears from now on, and where it notes that.
        tell: takes what is found, in the thread in which it happens; None for nobody.
    """

    def __init__(self, events: EventLog, tell: Callable[[Finding], None] | None) -> None:
        self._events = events
        self._tell = tell
        events.listener = self
        self._said: set[str] = set()
        self._is_scaled = False
        self._largest = 0.0
        self._count = self._high = 0

    def hear(self, event: Event) -> None:
        """There is an event."""
        if event.kind == "loss":
            self._hear_loss(event)
        elif event.kind == "nonfinite":
            self._hear_nonfinite(event)
        elif event.kind == OptimizerMade.kind:  # what it trains may be another model, with losses of its own
            self._largest, self._count, self._high = 0.0, 0, 0
        elif event.kind in ("scale", "skipped"):
            self._is_scaled = True

    def _hear_nonfinite(self, event: Event) -> None:
        for fact in read_facts([event]):
            is_search = self._is_scaled and isinstance(fact, NonFinite) and fact.born == "backward"
            if isinstance(fact, NonFinite) and not is_search:
                self._report(event, f"nan-{fact.born}", _describe(fact), fact.line)
                self._said.add("diverged")  # the loss follows

    def _hear_loss(self, event: Event) -> None:
        size, step = abs(event.value), event.moment.step
        if not math.isfinite(size):
            if not self._is_scaled:
                what = "NaN" if math.isnan(size) else "infinite"
                self._report(event, "diverged", f"The loss is {what} at step {step}.")
            return
        self._count += 1
        if self._count <= FIRST:
            self._largest = max(self._largest, size)
            return
        self._high = self._high + 1 if size > DIVERGED * self._largest > 0 else 0
        if self._high == LASTING:
            times = f"{size / self._largest:.0f} times the largest of the first {FIRST}"
            what = f"has been above {DIVERGED * self._largest:g} for {LASTING} losses: {event.value:g} at step {step}"
            self._report(event, "diverged", f"The loss {what}, {times}.")

    def _report(self, event: Event, detector: str, message: str, line: str = "") -> None:
        if detector in self._said:
            return
        self._said.add(detector)
        with random_kept(), warnings_kept():  # late, for it loads all that reads a record
            from retrograd.core.runs.findings import Evidence, Finding

        finding = Finding(
            detector=detector,
            severity="critical",
            message=message,
            site=event.name,
            step=event.moment.step,
            line=line,
            evidence=(Evidence("value", event.value),),
        )
        self._events.note("finding", event.name, value=event.value, text=finding.as_json(), moment=event.moment)
        if self._tell is not None:
            self._tell(finding)


def _describe(fact: NonFinite) -> str:
    """Describe what was seen, and no more: where it came from, the whole record may show at the end."""
    what = fact.made or "NaN or infinity"
    where = f" in {fact.name}" if fact.name else ""
    seen = f", first seen{where}" if where else ""
    reason = f": {fact.reason or fact.operation}" if fact.reason or fact.operation else ""
    if fact.born == "input":  # the operation only took it
        return f"{what} comes in at step {fact.step}{seen}{f': {fact.reason}' if fact.reason else ''}"
    if fact.born == "backward":
        seems = "" if fact.certain else ", it seems"
        return f"The gradient becomes {fact.made or 'NaN or infinite'}{where}, step {fact.step}{seems}{reason}"
    if fact.born == "update" and not fact.operation:  # a gradient may have been so before, or what is written by hand
        return f"{what} is in a parameter behind step {fact.step}{seen}"
    if not fact.certain and fact.operation:
        why = f": {fact.reason}" if fact.reason else ""
        return f"{what} is made by `{fact.operation}`{where}, or comes in there, step {fact.step}{why}"
    return f"{what} is made{where}, step {fact.step}{reason}"


def say_critical(finding: Finding) -> None:
    """Print it on stderr."""
    say(f"critical  {show_plainly(str(finding), keep='')}")
