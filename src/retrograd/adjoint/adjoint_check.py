"""The result of a check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from retrograd.adjoint.row import FAILURES, Row, Verdict, name_call, rank
from retrograd.adjoint.table import describe_faults, draw_table

Fault = tuple[tuple[str, int], Verdict]
"""A call, and what is wrong with it."""


class AdjointCheck:
    """What ``rg.check_adjoint`` found. It is true when nothing is wrong, not finite, random or without a graph.

    Printed, it is a table.

    Attributes:
        rows: all comparisons, the worst first.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        failing = {_fault(row): row.within for row in rows if row.verdict in FAILURES}
        through: dict[Fault, list[Fault]] = {}
        for inner, within in failing.items():
            for outer in within:
                through.setdefault((outer, inner[1]), []).append(inner)
        self._innermost = failing.keys() - through.keys()
        self.rows = tuple(sorted((_blame(row, through) for row in rows), key=self._rank))

    @property
    def faults(self) -> tuple[Row, ...]:
        """The failing comparisons of the innermost calls at fault.

        A call that another one with the same verdict is made in fails because of that one, or besides: fix the inner
        one first.
        """
        return tuple(row for row in self.rows if row.verdict in FAILURES and _fault(row) in self._innermost)

    def __bool__(self) -> bool:
        return not any(row.verdict in FAILURES for row in self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return f"{draw_table(self.rows)}\n\n{describe_faults(self.rows, self.faults)}"

    __repr__ = __str__

    def _rank(self, row: Row) -> tuple[int, bool, float]:
        verdict, excess = rank(row)
        return verdict, _fault(row) not in self._innermost, excess


def _fault(row: Row) -> Fault:
    return row.caller, row.verdict


def _blame(row: Row, through: dict[Fault, list[Fault]]) -> Row:
    if _fault(row) not in through:
        return row
    faults = through[_fault(row)]
    inner = [each for each in faults if each not in through] or faults
    return replace(row, reason=f"because of {', '.join(name_call(call) for call, _ in inner)}")
