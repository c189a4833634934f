"""Functions that are differentiated twice and keep what their forward computes."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.core.history.facts import LostPart
from retrograd.core.runs.findings import Finding, shorten_line
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import Record

family = Family(__name__)


@family.detector("second-derivative")
def lost_second_derivative(record: Record, entry: Entry) -> Iterator[Finding]:
    """A second derivative lacks a part, in silence."""
    for fact in record.of(LostPart):
        called = f" ({shorten_line(fact.called)})" if fact.called else ""
        yield entry.finding(
            f"{fact.name}{called} is differentiated twice, and saves what `{fact.operation}` "
            f"({shorten_line(fact.line)}) computes in its forward: to autograd that is a constant, and the second "
            "derivative lacks what goes through it",
            step=fact.step,
            line=fact.line,
            evidence=[("saved and not returned", f"`{fact.operation}`")],
        )
