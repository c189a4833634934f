"""Plans that are remembered, each for passes like the one it was made from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from retrograd.budget.measuring import Key
from retrograd.budget.plan import Plan

_MOST = 16
"""One for each sequence of sizes, such as that of a last, smaller batch."""


@dataclass(slots=True)
class Known:
    """A plan, and how to tell that a pass is like the one it was made for.

    Attributes:
        keys: of the stretches of that pass.
        plan: for it.
        is_timed: whether its times are those of a pass that followed a plan.
        triggers: stretch → those to bring back when it is first asked for.
        wanted: numbers of the operations that are run again.
    """

    keys: tuple[Key, ...]
    plan: Plan
    is_timed: bool = False
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

    def has_at(self, number: int, key: Key) -> bool:
        """Whether this stretch of its pass was like that."""
        return number < len(self.keys) and self.keys[number] == key


class KnownPlans:
    """As many as are worth their memory; the one used last is forgotten last."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Key, ...], Known] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def plans(self) -> list[Plan]:
        """All of them, the one used last at the end."""
        return [known.plan for known in self._known.values()]

    @property
    def have_reruns(self) -> bool:
        """Whether one of them runs operations again."""
        return any(known.wanted for known in self._known.values())

    def add(self, keys: Sequence[Key], plan: Plan, *, is_timed: bool = False) -> None:
        """Remember a plan for passes with these stretches."""
        known = Known(tuple(keys), plan, is_timed)
        self._known[known.keys] = known
        if len(self._known) > _MOST:
            self._known.popitem(last=False)

    def forget(self, known: Known) -> None:
        """It was made from a pass that was not like others."""
        self._known.pop(known.keys, None)

    def find(self, beginning: Sequence[Key]) -> Known | None:
        """The one used last of those whose passes begin with these stretches."""
        wanted = tuple(beginning)
        for known in reversed(self._known.values()):
            if known.keys[: len(wanted)] == wanted:
                self._known.move_to_end(known.keys)
                return known
        return None
