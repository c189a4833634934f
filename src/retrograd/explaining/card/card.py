"""A card: what a run did, in at most twelve lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from retrograd.core.amounts import list_names
from retrograd.core.drawings import drawn_by
from retrograd.core.foreign.text import show_plainly
from retrograd.core.runs.findings import make_plain, shorten_line

MOST_LINES = 12

MOST_ALIKE = 2
"""Lines about several of a kind: models, losses, optimizers, inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardEntry:
    """What is said of one thing.

    Attributes:
        topic: what it is about, in a word: ``loss``.
        label: which of several; empty where there is one alone.
        text: what is said, in one line.
        line: ``file:line`` of the program; empty where there is none.
        details: what the text leaves out.
        values: the numbers and names behind it, as JSON values.
    """

    topic: str
    text: str
    label: str = ""
    line: str = ""
    details: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        place = f" ({shorten_line(self.line)})" if self.line else ""
        return show_plainly(f"{self.topic:<11}{': '.join(filter(None, (self.label, self.text)))}{place}")


@dataclass(frozen=True, slots=True, repr=False)
class Card:
    """What a run did, as far as its record tells, without a judgement.

    Attributes:
        entries: all that is said, the most telling topic first.
    """

    entries: tuple[CardEntry, ...] = ()

    @property
    def lines(self) -> tuple[CardEntry, ...]:
        """At most twelve: entries of a topic that say the same are one, and of those that differ two are left."""
        said: dict[str, dict[str, list[CardEntry]]] = {}
        for each in self.entries:
            said.setdefault(each.topic, {}).setdefault(each.text, []).append(each)
        is_long = sum(min(len(alike), MOST_ALIKE) for alike in said.values()) > MOST_LINES
        most = 1 if is_long else MOST_ALIKE  # the first of every topic tells more than the second of one
        return tuple(line for alike in said.values() for line in _shorten(list(alike.values()), most))[:MOST_LINES]

    def of(self, topic: str) -> tuple[CardEntry, ...]:
        """Select the entries of one topic: ``card.of("optimizer")``."""
        return tuple(each for each in self.entries if each.topic == topic)

    def as_dict(self) -> dict[str, Any]:
        """Its lines and its entries as JSON values; a number that is not finite is text."""
        return {"lines": list(map(str, self.lines)), "entries": [make_plain(asdict(each)) for each in self.entries]}

    def as_json(self) -> str:
        """Write it as one line of JSON."""
        return json.dumps(self.as_dict(), ensure_ascii=False, allow_nan=False)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))

    __repr__ = __str__
    _repr_html_ = drawn_by("retrograd.explaining.views.card", "draw_card")


def _shorten(groups: list[list[CardEntry]], most: int) -> Iterator[CardEntry]:
    """Lines about one topic: those that say the same are one, and the last one counts those that are left out."""
    left = sum(map(len, groups[most:]))
    for number, alike in enumerate(groups[:most], 1):
        first, names = alike[0], list_names(list(dict.fromkeys(each.label for each in alike if each.label)), 2)
        yield CardEntry(
            topic=first.topic,
            text=first.text + (f"; {left:,} more" if left and number == most else ""),
            label=f"{names}, each" if len(alike) > 1 and names else names,
            line=first.line if len({each.line for each in alike}) == 1 else "",
            details=tuple(detail for each in alike for detail in each.details),
        )
