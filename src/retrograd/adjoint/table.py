"""A check as plain text: a line for each comparison, the worst first, and a sentence for each fault."""

from __future__ import annotations

import math
from collections.abc import Sequence

from retrograd.adjoint.row import Row, Verdict

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


def draw_table(rows: Sequence[Row]) -> str:
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


def describe_faults(rows: Sequence[Row], faults: Sequence[Row]) -> str:
    """What to take home from a check.

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


def _print_row(row: Row) -> tuple[str, ...]:
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
