"""A plan for saved tensors, and its explanation."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from retrograd.amounts import show_bytes
from retrograd.budget.measuring import Key
from retrograd.budget.planner import Solution, evaluate, find_plan, find_smallest, keep_all
from retrograd.budget.simulation import Choice, Link, MeasuredPass
from retrograd.errors import BudgetError

_CURVE_POINTS = 6
_CURVE_TRIALS = 200
_ROWS = 20
_KINDS = 6


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each storage range waits, and what comes of it. ``print(plan)`` explains it.

    Attributes:
        budget: bytes that may be held at any position.
        recording: the pass that it was made from.
        link: the speed with which memory leaves and comes back.
        solution: the decisions, the peak and the time.
        destination: where what leaves goes: ``"disk"`` or ``"host"``.
        smallest: the smallest budget, in bytes, that can be met.
    """

    budget: int
    recording: MeasuredPass
    link: Link
    solution: Solution
    destination: str
    smallest: int

    @property
    def choices(self) -> tuple[Choice, ...]:
        """One for each range, in the order in which they are packed."""
        return tuple(self.solution.decisions.choices)

    @property
    def predicted_peak(self) -> int:
        """Bytes held at the worst position."""
        return self.solution.peak

    @property
    def predicted_seconds(self) -> float:
        """Of forward and backward, from the first range that is packed to the last that is freed."""
        return self.solution.seconds

    @property
    def kept_peak(self) -> int:
        """Bytes held at the worst position if everything stays."""
        return keep_all(self.recording).peak

    @property
    def kept_seconds(self) -> float:
        """The time if everything stays."""
        return sum(self.recording.seconds)

    def with_times(self, recording: MeasuredPass) -> Plan:
        """A plan for the same pass, of which the times are known better now. It may choose otherwise."""
        as_it_is = evaluate(recording, self.choices, self.link, self.budget)
        found = find_plan(recording, self.link, self.budget)
        solutions = [solution for solution in (as_it_is, found) if solution is not None]
        return replace(self, recording=recording, solution=min(solutions, key=lambda solution: solution.seconds))

    def curve(self) -> list[tuple[int, float]]:
        """Predict what other budgets would cost: bytes and seconds, the smallest budget first."""
        kept = self.kept_peak
        steps = range(_CURVE_POINTS)
        budgets = {self.smallest + (kept - self.smallest) * step // (_CURVE_POINTS - 1) for step in steps}
        points = [(self.budget, self.predicted_seconds)] if self.smallest <= self.budget < kept else []
        for budget in budgets - {self.budget}:
            found = find_plan(self.recording, self.link, budget, trials=_CURVE_TRIALS)
            if found is not None:
                points.append((budget, found.seconds))
        return sorted(points)

    def explain(self) -> str:
        """The choice by module and kind, the predicted peak and time, and what other budgets would cost."""
        lines = [
            (
                f"Budget {show_bytes(self.budget)}: predicted peak {show_bytes(self.predicted_peak)} instead of"
                f" {show_bytes(self.kept_peak)}, predicted time {_milliseconds(self.predicted_seconds)} instead of"
                f" {_milliseconds(self.kept_seconds)}."
            ),
            f"The smallest budget that can be met is {show_bytes(self.smallest)}.",
        ]
        if self.recording.background:
            lines.append(f"Of the budget, earlier passes still held {show_bytes(self.recording.background)}.")
        lines += self._reruns()
        lines += ["", *self._table(), "", "   budget   predicted time"]
        for budget, seconds in self.curve():
            mark = "  <- this one" if budget == self.budget else ""
            lines.append(f"{show_bytes(budget):>9}   {_milliseconds(seconds):>14}{mark}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()

    def _reruns(self) -> list[str]:
        chosen = [
            saved_range
            for saved_range, choice in zip(self.recording.ranges, self.choices, strict=True)
            if choice == "rerun"
        ]
        if not chosen:
            return []
        counts = Counter(saved_range.rerun for saved_range in chosen).most_common()
        shown = "; ".join(f"{count} × {operations}" for operations, count in counts[:_KINDS])
        more = f"; and {len(counts) - _KINDS} more kinds" if len(counts) > _KINDS else ""
        return [
            f"Run again, in {_milliseconds(sum(saved_range.rerun_seconds for saved_range in chosen))}: {shown}{more}."
        ]

    def _table(self) -> list[str]:
        sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
        for saved_range, choice in zip(self.recording.ranges, self.choices, strict=True):
            entry = sums[
                saved_range.path or "(no module)", saved_range.kind, self.destination if choice == "offload" else choice
            ]
            entry[0] += 1
            entry[1] += saved_range.nbytes
        rows = sorted(sums.items(), key=lambda item: -item[1][1])
        width = max((len(key[0]) for key, _ in rows[:_ROWS]), default=6)
        kinds = max((len(key[1]) for key, _ in rows[:_ROWS]), default=4)
        lines = [f"{'module':<{width}}  {'kind':<{kinds}}  {'waits':<8}  number      bytes"]
        for (path, kind, place), (count, nbytes) in rows[:_ROWS]:
            lines.append(f"{path:<{width}}  {kind:<{kinds}}  {place:<8}  {count:6}  {show_bytes(nbytes):>9}")
        if len(rows) > _ROWS:
            rest = rows[_ROWS:]
            nbytes = sum(entry[1] for _, entry in rest)
            lines.append(f"… and {len(rest)} more rows, {show_bytes(nbytes)}")
        return lines


def make_plan(recording: MeasuredPass, link: Link, budget: int, destination: str) -> Plan:
    """A plan for a recorded pass.

    Raises:
        BudgetError: none was found that keeps to the budget.
    """
    solution = find_plan(recording, link, budget)
    smallest = find_smallest(recording, link)
    if solution is None:
        raise BudgetError(
            f"Saved tensors cannot be kept within {show_bytes(budget)}.",
            repair=f"give a budget of at least {show_bytes(smallest * 1.005)} ({smallest} bytes), or a smaller batch.",
            reason="what a node needs must be in memory while it runs, and what the program itself holds stays there.",
        )
    return Plan(budget, recording, link, solution, destination, smallest)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


_MOST = 16
"""One for each sequence of sizes, such as that of a last, smaller batch."""


@dataclass(slots=True)
class KnownPlan:
    """A plan, and how to tell that a pass is like the one it was made for.

    Attributes:
        keys: of the ranges of that pass.
        plan: for it.
        is_timed: whether its times are those of a pass that followed a plan.
        triggers: range → those to bring back when it is first asked for.
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
        choices = zip(self.plan.recording.ranges, self.plan.choices, strict=True)
        self.wanted = frozenset(
            number for saved_range, choice in choices if choice == "rerun" for number in saved_range.rerun_numbers
        )

    def has_at(self, number: int, key: Key) -> bool:
        """Whether this range of its pass was like that."""
        return number < len(self.keys) and self.keys[number] == key


class KnownPlans:
    """As many as are worth their memory; the one used last is forgotten last."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Key, ...], KnownPlan] = OrderedDict()

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
        """Remember a plan for passes with these ranges."""
        known = KnownPlan(tuple(keys), plan, is_timed)
        self._known[known.keys] = known
        if len(self._known) > _MOST:
            self._known.popitem(last=False)

    def forget(self, known: KnownPlan) -> None:
        """Forget a plan that was made from a pass unlike others."""
        self._known.pop(known.keys, None)

    def find(self, beginning: Sequence[Key]) -> KnownPlan | None:
        """The one used last of those whose passes begin with these ranges."""
        wanted = tuple(beginning)
        for known in reversed(self._known.values()):
            if known.keys[: len(wanted)] == wanted:
                self._known.move_to_end(known.keys)
                return known
        return None
