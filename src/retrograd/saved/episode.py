"""A pass under a plan, or one that is measured for a plan."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from retrograd.saved.measuring import Key, Log
from retrograd.saved.plan import Plan
from retrograd.saved.planned_item import Item


@dataclass(slots=True)
class Known:
    """A plan, and how to tell that a pass is like the one it was made for.

    Attributes:
        keys: of the stretches of that pass.
        plan: for it.
        triggers: stretch → those to bring back when it is first asked for.
        wanted: numbers of the operations that are run again.
    """

    keys: list[Key]
    plan: Plan
    triggers: dict[int, list[int]] = field(default_factory=dict)
    wanted: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        events = self.plan.recording.events
        for number, position in self.plan.solution.decisions.fetches.items():
            self.triggers.setdefault(events[position][1], []).append(number)
        choices = zip(self.plan.recording.stretches, self.plan.choices, strict=True)
        self.wanted = frozenset(
            number for stretch, choice in choices if choice == "rerun" for number in stretch.rerun_numbers
        )


class Episode:
    """A pass that is under way.

    Attributes:
        log: notes of it.
        known: the plan that it follows; None if it is like none that is known.
        is_alike: whether it may still be found to be like a known one.
        items: what was packed.
        is_taped: whether the operations of the forward are seen.
    """

    def __init__(self, background: int, is_taped: bool) -> None:
        self.log = Log(background)
        self.is_taped = is_taped
        self.known: Known | None = None
        self.is_alike = True
        self.items: list[weakref.ref[Item]] = []

    def follow(self, number: int) -> None:
        """A stretch is asked for: bring back what the plan wants to be on its way now."""
        known = self.known
        for wanted in () if known is None else known.triggers.get(number, ()):
            item = self.items[wanted]() if wanted < len(self.items) else None
            if item is not None:
                item.fetch()
