"""Tiny records as data: with the fault of a detector, with what only looks like it, or of which nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrograd.explaining.findings.record import Record

Make = Callable[[], Record]


@dataclass(frozen=True)
class Row:
    """A record and what is found in it.

    Attributes:
        slug: the detector.
        make: makes the record.
        severities: of the findings; none for a look-alike.
        words: texts of the message, or of the reason.
        fields: of the finding.
        unknown: it cannot tell.
    """

    slug: str
    make: Make
    severities: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    unknown: bool = False


def faulty(slug: str, make: Make, severity: str, *words: str, **fields: Any) -> list[Row]:
    """A record with one finding, by its severity, texts of its message, and other fields."""
    return [Row(slug, make, (severity,), words, fields)]


def alike(slug: str, *makes: Make) -> list[Row]:
    """Records that look as if they had the fault."""
    return [Row(slug, make) for make in makes]


def unknown(slug: str, make: Make, reason: str) -> list[Row]:
    """A record of which the detector cannot tell, and why."""
    return [Row(slug, make, words=(reason,), unknown=True)]


def gather(*groups: Sequence[Row]) -> list[Row]:
    """All rows, one after the other."""
    return [row for group in groups for row in group]
