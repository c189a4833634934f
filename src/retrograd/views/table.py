"""A run as a table in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from retrograd.history.history import History
from retrograd.runs.reader import Run
from retrograd.views.counts import count_of
from retrograd.views.history_of import choose_sites, find_phase, history_of
from retrograd.views.sparkline import BLOCKS, PLAIN_BLOCKS, draw_sparkline
from retrograd.views.summary import Order, Summary, sort_summaries, summarize
from retrograd.views.terminal import can_print, open_console, print_name, print_number, print_share

SPARKLINE_WIDTH = 24


def print_table(
    run: Run | History,
    sites: Iterable[str] | None = None,
    *,
    statistic: str = "rms",
    sort: Order = "calls",
    file: TextIO | None = None,
) -> None:
    """Print a line for each place: its last value and gradient, how the gradient came there, and what is odd.

    Numbers are of the finite elements; NaN stands where none was finite at the last step, not the number before.
    For a terminal the table is coloured and as wide as the window; for a pipe it is plain and nothing is cut.

    Args:
        run: a run folder as opened by ``open_run``, or a history.
        sites: names or globs, as in ``blocks.*:output.grad``; all sites when left out.
        statistic: the statistic of the columns ``value``, ``gradient`` and ``over steps``.
        sort: ``calls`` for call order, ``name``, or a column to sort by, largest first.
        file: where to print; standard output when left out.

    Raises:
        NoSuchSiteError: for a pattern that matches nothing; the nearest sites are named.
        StatisticError: for a statistic that was not recorded.
        PatternError: for an order that is none.
    """
    history = history_of(run)
    chosen = choose_sites(history, sites)
    phase = find_phase(history)
    summaries = sort_summaries(summarize(history, chosen, statistic, phase), sort)
    steps = history.matrix("count", chosen, phase=phase).steps
    console = open_console(file)
    span = f"steps {steps[0]:,} to {steps[-1]:,}" if len(steps) else "no steps"
    console.print(
        f"{count_of(len(summaries), 'place')}, {span}, {statistic}, phase {phase}",
        style="dim",
    )
    console.print(_make_table(summaries, BLOCKS if can_print(console, BLOCKS) else PLAIN_BLOCKS, console))


def _make_table(summaries: list[Summary], blocks: str, console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, header_style="bold")
    table.add_column("site", overflow="fold" if console.is_terminal else "ignore", no_wrap=not console.is_terminal)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("gradient", justify="right", no_wrap=True)
    table.add_column("over steps", no_wrap=True)
    table.add_column("zeros", justify="right", no_wrap=True)
    table.add_column("nonfinite", justify="right", no_wrap=True)
    table.add_column("update", justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            Text(print_name(console, summary.place.name)),
            _mark(summary.value),
            _mark(summary.gradient),
            Text(draw_sparkline(summary.curve, SPARKLINE_WIDTH, blocks=blocks), style="cyan"),
            "-" if summary.zeros is None else print_share(summary.zeros),
            Text(f"{summary.nonfinite:,}" if summary.nonfinite else "-", style="bold red" if summary.nonfinite else ""),
            _mark(summary.update),
        )
    return table


def _mark(number: float | None) -> Text:
    """A number, a dash for none, and NaN so that it is seen."""
    if number is not None and math.isnan(number):
        return Text("NaN", style="bold red")
    return Text("-" if number is None else print_number(number))
