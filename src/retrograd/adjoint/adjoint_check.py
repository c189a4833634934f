"""The result of a check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from retrograd.adjoint.row import Row, Verdict, name_call, rank
from retrograd.adjoint.table import describe_faults, draw_table


class AdjointCheck:
    """What ``rg.check_adjoint`` found. It is true when no backward is wrong; printed, it is a table.

    Attributes:
        rows: all comparisons, the worst first.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        wrong = {row.caller for row in rows if row.verdict is Verdict.WRONG}
        through: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for caller in dict.fromkeys(row.caller for row in rows if row.verdict is Verdict.WRONG):
            (within,) = {row.within for row in rows if row.caller == caller}
            for outer in within:
                through.setdefault(outer, []).append(caller)
        self._innermost = wrong - through.keys()
        self.rows = tuple(sorted((_blame(row, through) for row in rows), key=self._rank))

    @property
    def faults(self) -> tuple[Row, ...]:
        """The wrong comparisons of the innermost calls at fault.

        A call that another wrong call is made in is wrong because of that one, or besides: mend the inner one first.
        """
        return tuple(row for row in self.rows if row.verdict is Verdict.WRONG and row.caller in self._innermost)

    def __bool__(self) -> bool:
        return not any(row.verdict is Verdict.WRONG for row in self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return f"{draw_table(self.rows)}\n\n{describe_faults(self.rows, self.faults)}"

    __repr__ = __str__

    def _rank(self, row: Row) -> tuple[int, bool, float]:
        verdict, excess = rank(row)
        return verdict, row.caller not in self._innermost, excess


def _blame(row: Row, through: dict[tuple[str, int], list[tuple[str, int]]]) -> Row:
    if row.verdict is not Verdict.WRONG or row.caller not in through:
        return row
    inner = [each for each in through[row.caller] if each not in through] or through[row.caller]
    return replace(row, reason=f"because of {', '.join(map(name_call, inner))}")
