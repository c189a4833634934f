# ruff: noqa: INP001  # a folder of pages, not a package
"""Makes the table of ``kinks.md`` from the code: ``python docs/make_kinks.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from retrograd.explaining.kinks.point import Convention, Point
from retrograd.explaining.kinks.table import ALL_POINTS

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
    for point in ALL_POINTS:
        convention = point.convention
        cells = (
            f"`{point.operation}`",
            point.where + _name_versions(point),
            point.gives,
            convention.value,
            _RULES[convention],
            f"`{point.example}`, {_show(point)}",
        )
        yield f"| {' | '.join(cells)} |"


def _name_versions(point: Point) -> str:
    if point.since is not None:
        return f" (from torch {'.'.join(map(str, point.since))} on)"
    return f" (before torch {'.'.join(map(str, point.before))})" if point.before is not None else ""


def _show(point: Point) -> str:
    values = ", ".join(
        "−∞" if each == float("-inf") else "∞" if each == float("inf") else f"{each:g}" for each in point.at
    )
    return values if len(point.at) == 1 else f"({values})"


if __name__ == "__main__":
    page = Path(__file__).with_name("kinks.md")
    page.write_text(put_table_in(page.read_text(encoding="utf-8")), encoding="utf-8")
