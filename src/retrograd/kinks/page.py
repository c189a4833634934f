"""The page of documentation about kinks, made from the table."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.kinks.convention import Convention
from retrograd.kinks.point import Point
from retrograd.kinks.table import POINTS

BEGIN, END = "<!-- table -->", "<!-- /table -->"

_RULES = {
    Convention.GRADIENT: "1",
    Convention.SUBGRADIENT: "2",
    Convention.SUPERGRADIENT: "3",
    Convention.LIMIT: "4",
    Convention.ARBITRARY: "5",
    Convention.ZERO: "6",
    Convention.ONE_SIDE: "–",
    Convention.NONE_OF_THEM: "–",
}


def put_table_in(page: str) -> str:
    """The page with a table made anew between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{make_table()}{END}{after}"


def make_table() -> str:
    """Every row of the table, in Markdown."""
    lines = ["| operation | where | torch gives | which is | rule | for example, at x |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *_make_rows()]) + "\n"


def _make_rows() -> Iterator[str]:
    for point in POINTS:
        convention = point.convention
        cells = (
            f"`{point.operation}`",
            point.where,
            point.gives,
            convention.value,
            _RULES[convention],
            f"`{point.example}`, {_show(point)}",
        )
        yield f"| {' | '.join(cells)} |"


def _show(point: Point) -> str:
    values = ", ".join(
        "−∞" if each == float("-inf") else "∞" if each == float("inf") else f"{each:g}" for each in point.at
    )
    return values if len(point.at) == 1 else f"({values})"
