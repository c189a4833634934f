"""The runs of a folder as a table in the terminal."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import TextIO

from retrograd.core.amounts import count_of
from retrograd.core.runs.listing import RunLine
from retrograd.core.views.terminal import giving_text, make_table, open_console, print_loss

_COLUMNS = {
    "run": "name",
    "started": "text",
    "last step": "number",
    "status": "text",
    "loss": "number",
    "findings": "text",
}


def print_runs(lines: Sequence[RunLine], *, file: TextIO | None = None) -> None:
    """Print a line for each run, in the order given.

    Args:
        lines: as from :func:`retrograd.core.runs.listing.list_runs`.
        file: where to print; standard output when left out.
    """
    console = open_console(file)
    rows = [
        (
            line.name,
            _print_time(line.started),
            "-" if line.last_step is None else f"{line.last_step:,}",
            line.status + (f", {count_of(line.lost, 'row')} lost" if line.lost else ""),
            "-" if line.loss is None else print_loss(line.loss),
            count_findings(line.findings),
        )
        for line in lines
    ]
    console.print(make_table(console, _COLUMNS, rows))


format_runs = giving_text(print_runs)


def count_findings(counts: Mapping[str, int] | None) -> str:
    """How many findings there are, the worst first; a dash where none were looked for."""
    if counts is None:
        return "-"
    found = [count_of(n, each, each if each == "critical" else "") for each, n in counts.items() if n]
    return ", ".join(found) or "none"


def _print_time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M") if seconds else "-"
