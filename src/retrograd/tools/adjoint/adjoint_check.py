"""The result of a check: its rows, and the table that they are printed as."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from retrograd.core.drawings import drawn_by
from retrograd.core.groups import gather
from retrograd.core.sites.site import Site


class Verdict(Enum):
    """The verdict on one comparison.

    Attributes:
        WRONG: the backward is not an adjoint of the forward.
        NOT_FINITE: what the forward returns is not finite, or its derivative is infinite.
        RANDOM: what the forward returns is drawn at random, and not a function of what is asked for; or the backward
            gives another gradient when it is run again.
        NO_GRAPH: what the forward returns has no graph, so that no gradient arrives.
        REWRITTEN: it is one, and a hook or a rule changes what it gives, as it is meant to.
        NOT_CHECKED: it could not be compared; the reason says why.
        KINK: the forward has no derivative where the batch lies; close by, the backward is its adjoint.
        OK: it is its adjoint.
    """

    WRONG = "wrong"
    NOT_FINITE = "not finite"
    RANDOM = "random"
    NO_GRAPH = "no graph"
    REWRITTEN = "rewritten"
    NOT_CHECKED = "not checked"
    KINK = "kink"
    OK = "ok"


ORDER = tuple(Verdict)
"""Verdicts, the worst first."""
FAILURES = frozenset({Verdict.WRONG, Verdict.NOT_FINITE, Verdict.RANDOM, Verdict.NO_GRAPH})
"""With one of them a model is not to be trained as it is."""


@dataclass(frozen=True, slots=True)
class AdjointRow:
    """A comparison of a derivative with its backward.

    Attributes:
        site: the call and the argument or parameter that the derivative is taken with respect to: ``fc:input.x``,
            ``cell#2:weight``.
        caller: the path of the module that was called, and which of its calls it was.
        kind: the type of that module.
        within: the calls that this one is made in, the outermost first.
        forward: ⟨J v, u⟩; NaN where it is not known.
        backward: ⟨v, Jᵀ u⟩; NaN where it is not known.
        difference: their difference, relative to the largest of both and of the norm of Jᵀ u.
        tolerance: how large that may be.
        method: how ``forward`` was found: "forward mode" or "finite differences".
        precision: the dtype that was computed in.
        verdict: what was found.
        reason: what the mismatch looks like, or why nothing was compared.
    """

    site: Site
    caller: tuple[str, int]
    kind: str
    verdict: Verdict
    within: tuple[tuple[str, int], ...] = ()
    reason: str = ""
    forward: float = math.nan
    backward: float = math.nan
    difference: float = math.nan
    tolerance: float = math.nan
    method: str = ""
    precision: str = ""

    @property
    def caller_name(self) -> str:
        """The call, as in ``blocks.0.fc`` or ``cell#2``."""
        return name_call(self.caller)


def name_call(caller: tuple[str, int]) -> str:
    """A call, as in ``blocks.0.fc`` or ``cell#2``."""
    path, call = caller
    return path if call == 1 else f"{path}#{call}"


def rank(row: AdjointRow) -> tuple[int, float]:
    """Sorts rows, the worst first."""
    excess = row.difference / row.tolerance if row.tolerance else 0.0
    return ORDER.index(row.verdict), -excess if math.isfinite(excess) else 0.0


Fault = tuple[tuple[str, int], Verdict]
"""A call, and what is wrong with it."""


class AdjointCheck:
    """The result of ``rg.check_adjoint``; true when nothing is wrong, not finite, random or without a graph.

    Printed, it is a table.

    Attributes:
        rows: all comparisons, the worst first.
    """

    def __init__(self, rows: Sequence[AdjointRow]) -> None:
        failing = {_fault(row): row.within for row in rows if row.verdict in FAILURES}
        through = gather(((outer, inner[1]), inner) for inner, within in failing.items() for outer in within)
        self._innermost = failing.keys() - through.keys()
        self.rows = tuple(sorted((_blame(row, through) for row in rows), key=self._rank))

    @property
    def faults(self) -> tuple[AdjointRow, ...]:
        """The failing comparisons of the innermost calls at fault.

        A call that another one with the same verdict is made in fails because of that one, or besides: fix the inner
        one first.
        """
        return tuple(row for row in self.rows if row.verdict in FAILURES and _fault(row) in self._innermost)

    def __bool__(self) -> bool:
        return not any(row.verdict in FAILURES for row in self.rows)

    def __iter__(self) -> Iterator[AdjointRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return f"{draw_table(self.rows)}\n\n{describe_faults(self.rows, self.faults)}"

    __repr__ = __str__
    _repr_html_ = drawn_by("retrograd.tools.views.notebook", "draw_check")

    def _rank(self, row: AdjointRow) -> tuple[int, bool, float]:
        verdict, excess = rank(row)
        return verdict, _fault(row) not in self._innermost, excess


def _fault(row: AdjointRow) -> Fault:
    return row.caller, row.verdict


def _blame(row: AdjointRow, through: dict[Fault, list[Fault]]) -> AdjointRow:
    if _fault(row) not in through:
        return row
    faults = through[_fault(row)]
    inner = [each for each in faults if each not in through] or faults
    return replace(row, reason=f"because of {', '.join(name_call(call) for call, _ in inner)}")


_HEADINGS = ("site", "<J v, u>", "<v, J^T u>", "difference", "tolerance", "J v by", "verdict", "")
_NUMBERS = range(1, 5)
_MOST_FINE_ROWS = 30
_FINE = (Verdict.OK,)
_WORDS = {
    Verdict.WRONG: "is at fault: its gradient of {0.site} is wrong; {0.reason}",
    Verdict.NOT_FINITE: "is not finite: {0.reason} ({0.site})",
    Verdict.RANDOM: "is random: {0.reason} ({0.site})",
    Verdict.NO_GRAPH: "has no gradient of {0.site}: {0.reason}",
}


def draw_table(rows: Sequence[AdjointRow]) -> str:
    """The rows as aligned text. Of many that are fine, only the first are shown."""
    notable = [row for row in rows if row.verdict not in _FINE]
    fine = [row for row in rows if row.verdict in _FINE]
    shown = [*notable, *fine[:_MOST_FINE_ROWS]]
    cells = [_HEADINGS, *map(_print_row, shown)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS))]
    lines = [
        "  ".join(_align(text, width, place) for place, (text, width) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    if len(fine) > _MOST_FINE_ROWS:
        lines.append(f"... and {len(fine) - _MOST_FINE_ROWS:,} more that are ok")
    return "\n".join(line.rstrip() for line in lines)


def describe_faults(rows: Sequence[AdjointRow], faults: Sequence[AdjointRow]) -> str:
    """Describe in a sentence each what is at fault, or that nothing is.

    Args:
        rows: all of it.
        faults: the failing ones of the innermost calls at fault.
    """
    if faults:
        return "\n".join(f"{row.caller_name} ({row.kind}) {_WORDS[row.verdict].format(row)}." for row in faults)
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    agreeing = counts[Verdict.OK] + counts[Verdict.KINK]
    others = [f"{count:,} {verdict.value}" for verdict, count in counts.items() if count and verdict is not Verdict.OK]
    tail = f" ({', '.join(others)})" if others else ""
    return f"{agreeing:,} of {len(rows):,} comparisons agree{tail}; no backward is wrong."


def _align(text: str, width: int, place: int) -> str:
    return text.rjust(width) if place in _NUMBERS else text.ljust(width)


def _print_row(row: AdjointRow) -> tuple[str, ...]:
    return (
        str(row.site) if row.site.path == row.caller[0] else f"{row.caller_name} > {row.site}",
        _print(row.forward, "+.6e"),
        _print(row.backward, "+.6e"),
        _print(row.difference, ".1e"),
        _print(row.tolerance, ".0e"),
        f"{row.method}, {row.precision}" if row.precision not in ("", "float64") else row.method,
        row.verdict.value,
        row.reason,
    )


def _print(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
