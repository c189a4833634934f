"""A plan for saved tensors, and its explanation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from retrograd.core.amounts import show_bytes
from retrograd.core.drawings import drawn_by
from retrograd.core.errors import BudgetError
from retrograd.memory.budget.planner import Solution, evaluate, find_smallest, find_solution, keep_all
from retrograd.memory.budget.simulation import Choice, Link, MeasuredPass, SavedRange

_CURVE_POINTS = 6
_CURVE_TRIALS = 200
_ROWS = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice for each storage range, and the peak and time that follow. ``print(plan)`` explains it.

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
        """The choice for each range, in the order in which they are packed."""
        return tuple(self.solution.decisions.choices)

    def chosen(self) -> Iterator[tuple[SavedRange, Choice]]:
        """Go through the ranges with their choices."""
        return zip(self.recording.ranges, self.choices, strict=True)

    @property
    def predicted_peak(self) -> int:
        """Bytes held at the worst position."""
        return self.solution.peak

    @property
    def predicted_seconds(self) -> float:
        """The time of forward and backward, from the first range that is packed to the last that is freed."""
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
        found = find_solution(recording, self.link, self.budget)
        solutions = [solution for solution in (as_it_is, found) if solution is not None]
        return replace(self, recording=recording, solution=min(solutions, key=lambda solution: solution.seconds))

    def curve(self) -> list[tuple[int, float]]:
        """Predict what other budgets would cost: bytes and seconds, the smallest budget first."""
        kept = self.kept_peak
        steps = range(_CURVE_POINTS)
        budgets = {self.smallest + (kept - self.smallest) * step // (_CURVE_POINTS - 1) for step in steps}
        points = [(self.budget, self.predicted_seconds)] if self.smallest <= self.budget < kept else []
        for budget in budgets - {self.budget}:
            found = find_solution(self.recording, self.link, budget, trials=_CURVE_TRIALS)
            if found is not None:
                points.append((budget, found.seconds))
        return sorted(points)

    def explain(self) -> str:
        """The choice by module and kind, the predicted peak and time, and what other budgets would cost."""
        lines = [*self.headlines(), "", *self._table(), "", "   budget   predicted time"]
        for budget, seconds in self.curve():
            mark = "  <- this one" if budget == self.budget else ""
            lines.append(f"{show_bytes(budget):>9}   {_milliseconds(seconds):>14}{mark}")
        return "\n".join(lines)

    def headlines(self) -> list[str]:
        """The predicted peak and time, in sentences."""
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
        return lines

    def __str__(self) -> str:
        return self.explain()

    _repr_html_ = drawn_by("retrograd.memory.views.notebook", "draw_budget_plan")

    def add_up(self) -> list[tuple[tuple[str, str, str], int, int]]:
        """Ranges and bytes by module, kind and where they wait, the most bytes first."""
        sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
        for saved_range, choice in self.chosen():
            place = self.destination if choice == "offload" else choice
            entry = sums[saved_range.path or "(no module)", saved_range.kind, place]
            entry[0] += 1
            entry[1] += saved_range.nbytes
        rows = [(key, count, nbytes) for key, (count, nbytes) in sums.items()]
        return sorted(rows, key=lambda row: -row[2])

    def _table(self) -> list[str]:
        rows = self.add_up()
        width = max((len(key[0]) for key, _, _ in rows[:_ROWS]), default=6)
        kinds = max((len(key[1]) for key, _, _ in rows[:_ROWS]), default=4)
        lines = [f"{'module':<{width}}  {'kind':<{kinds}}  {'waits':<8}  number      bytes"]
        for (path, kind, place), count, nbytes in rows[:_ROWS]:
            lines.append(f"{path:<{width}}  {kind:<{kinds}}  {place:<8}  {count:6}  {show_bytes(nbytes):>9}")
        if len(rows) > _ROWS:
            rest = rows[_ROWS:]
            nbytes = sum(nbytes for _, _, nbytes in rest)
            lines.append(f"… and {len(rest)} more rows, {show_bytes(nbytes)}")
        return lines


def make_plan(recording: MeasuredPass, link: Link, budget: int, destination: str) -> Plan:
    """Make a plan for a recorded pass.

    Raises:
        BudgetError: none was found that keeps to the budget.
    """
    solution = find_solution(recording, link, budget)
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
