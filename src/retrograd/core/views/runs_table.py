"""The runs of a folder as a table in the terminal."""

from __future__ import annotations

import datetime as dt
import math
import os
from collections.abc import Mapping, Sequence
from typing import TextIO

from retrograd.core.amounts import count_of, list_names
from retrograd.core.foreign.text import show_plainly
from retrograd.core.runs.listed import ListedRun, find_differing, list_columns, value_of
from retrograd.core.runs.loss_curve import LossCurve
from retrograd.core.runs.settings import Setting
from retrograd.core.views.terminal import (
    BLOCKS,
    PLAIN_BLOCKS,
    can_print,
    draw_sparkline,
    giving_text,
    make_table,
    open_console,
    print_loss,
)

_CURVE_WIDTH = 16
_SPARED = ("loss", "started", "last step", "curve", "status")
"""Columns that are left out in this order where there is little room, for the names of runs stay."""


def print_runs(runs: Sequence[ListedRun], *, file: TextIO | None = None) -> None:
    """Print a line for each run, in the order given, with the settings in which they differ.

    A terminal gets as many columns as it is wide, names first, as anything does where ``COLUMNS`` says a width.
    Anything else gets all.

    Args:
        runs: those to print.
        file: where to print; standard output when left out.
    """
    console = open_console(file)
    blocks = BLOCKS if can_print(console, BLOCKS) else PLAIN_BLOCKS
    columns: dict[str, tuple[str, list[str]]] = {
        "run": ("name", [run.line.name for run in runs]),
        "started": ("text", [show_time(run.line.started) for run in runs]),
        "last step": ("number", ["-" if run.line.last_step is None else f"{run.line.last_step:,}" for run in runs]),
        "status": ("text", [_tell_status(run) for run in runs]),
        "loss": ("number", ["-" if run.line.loss is None else print_loss(run.line.loss) for run in runs]),
        "final": ("number", [_print_final(run) for run in runs]),
        "curve": ("text", [_draw(run, blocks) for run in runs]),
        "findings": ("text", [count_findings(run.line.findings) for run in runs]),
    }
    logged = dict.fromkeys(name for run in runs if run.curve for name in run.curve.logged)
    differing = [*logged, *find_differing([run.settings for run in runs])]
    width = console.width if console.is_terminal else os.environ.get("COLUMNS", "")
    room = (float(width) if str(width).isdecimal() else math.inf) - sum(map(_measure, columns.items()))
    left_out = []
    for name in _SPARED:
        if room < 0:
            room += _measure((name, columns.pop(name)))
            left_out.append(name)
    for name in differing:
        column = ("number", [show_setting(value_of(run, name)) for run in runs])
        room -= _measure((name, column))
        if room >= 0:
            columns[name] = column
        else:
            left_out.append(name)
    kinds = {title: kind for title, (kind, _) in columns.items()}
    console.print(make_table(console, kinds, zip(*(cells for _, cells in columns.values()), strict=True)))
    if left_out:
        console.print(f"A wider window or --json also shows {list_names(left_out, 8)}.", style="dim")


format_runs = giving_text(print_runs)


def join_by_tabs(runs: Sequence[ListedRun]) -> str:
    """All columns by which runs can be ordered, one run a line below their names, for ``cut`` and ``awk``.

    Numbers are written in full; what is not known is empty.
    """
    columns = list_columns(runs)
    lines = [columns, *([_write(run, name) for name in columns] for run in runs)]
    return "".join("\t".join(show_plainly(cell, keep="") for cell in line) + "\n" for line in lines)


def _write(run: ListedRun, column: str) -> str:
    value = value_of(run, column)
    if value is None:
        return ""
    if column == "findings":
        return count_findings(run.line.findings)
    return show_time(value) if column == "when" else str(value)


def print_differences(letters: Sequence[str], runs: Sequence[tuple[Mapping[str, Setting], LossCurve]]) -> None:
    """Print the losses of runs that are compared, and the settings in which they differ: a column for each run."""
    console = open_console()
    blocks = BLOCKS if can_print(console, BLOCKS) else PLAIN_BLOCKS
    rows = [
        ("loss", *(draw_sparkline(curve.values, _CURVE_WIDTH, blocks=blocks) or "-" for _, curve in runs)),
        ("final loss", *("-" if curve.final is None else print_loss(curve.final) for _, curve in runs)),
    ]
    differing = find_differing([settings for settings, _ in runs])
    rows += [(name, *(show_setting(settings.get(name)) for settings, _ in runs)) for name in differing]
    console.print(make_table(console, {"": "text", **dict.fromkeys(letters, "name")}, rows))


def show_setting(value: Setting | None) -> str:
    """A setting as it is read in a table; a dash where a run has none."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_time(seconds: float) -> str:
    """Date and minute, on the clock of this machine; a dash where it is not known."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M") if seconds else "-"


def _measure(titled: tuple[str, tuple[str, list[str]]]) -> int:
    title, (_, cells) = titled
    return max(map(len, [title, *cells])) + 2


def _tell_status(run: ListedRun) -> str:
    return run.line.status + (f", {count_of(run.line.lost, 'row')} lost" if run.line.lost else "")


def _print_final(run: ListedRun) -> str:
    return "-" if run.curve is None or run.curve.final is None else print_loss(run.curve.final)


def _draw(run: ListedRun, blocks: str) -> str:
    values = None if run.curve is None else run.curve.values
    return "-" if values is None or not len(values) else draw_sparkline(values, _CURVE_WIDTH, blocks=blocks)


def count_findings(counts: Mapping[str, int] | None) -> str:
    """How many findings there are, the worst first; a dash where none were looked for."""
    if counts is None:
        return "-"
    found = [count_of(n, each, each if each == "critical" else "") for each, n in counts.items() if n]
    return ", ".join(found) or "none"
