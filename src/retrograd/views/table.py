"""A run as a table in the terminal: a line for each place, how it stands at the end and how it came there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO, get_args

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from retrograd.amounts import count_of
from retrograd.errors import PatternError
from retrograd.history.history import History
from retrograd.history.sink import Phase
from retrograd.runs.reader import Given, read_history
from retrograd.sites.site import Quantity
from retrograd.views.downsample import FloatArray
from retrograd.views.shown import Place, choose_sites, find_phase, group_places
from retrograd.views.terminal import (
    BLOCKS,
    PIPED_WIDTH,
    PLAIN_BLOCKS,
    can_print,
    draw_sparkline,
    giving_text,
    make_table,
    open_console,
    print_name,
    print_number,
    print_share,
)

SPARKLINE_WIDTH = 24
NARROWEST_SPARKLINE = 8
_CURVE = 3  # the column of the curves


def print_table(
    run: Given,
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
        run: a run, its folder, a recording, or a history.
        sites: names or globs, as in ``blocks.*:output.grad``; all sites when left out.
        statistic: the statistic of the columns ``value``, ``gradient`` and ``over steps``.
        sort: ``calls`` for call order, ``name``, or a column to sort by, largest first.
        file: where to print; standard output when left out.

    Raises:
        NoSuchSiteError: for a pattern that matches nothing; the nearest sites are named.
        StatisticError: for a statistic that was not recorded.
        PatternError: for an unknown order.
    """
    history = read_history(run)
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
    console.print(_fit(summaries, console))


format_table = giving_text(print_table)


def _fit(summaries: list[Summary], console: Console) -> Table:
    """The table, with shorter curves where the window is too narrow for long ones beside the names."""
    table = _tabulate(summaries, SPARKLINE_WIDTH, console)
    wanted = console.measure(table, options=console.options.update(width=PIPED_WIDTH)).maximum
    if wanted <= console.width:
        return table
    drawn = max(len(str(cell)) for cell in table.columns[_CURVE].cells)
    return _tabulate(summaries, max(NARROWEST_SPARKLINE, drawn - (wanted - console.width)), console)


def _tabulate(summaries: list[Summary], width: int, console: Console) -> Table:
    blocks = BLOCKS if can_print(console, BLOCKS) else PLAIN_BLOCKS
    table = make_table(
        console,
        {
            "site": "name",
            "value": "number",
            "gradient": "number",
            "over steps": "text",
            "zeros": "number",
            "nonfinite": "number",
            "update": "number",
        },
    )
    for summary in summaries:
        table.add_row(
            Text(print_name(console, summary.place.name)),
            _mark(summary.value),
            _mark(summary.gradient),
            Text(draw_sparkline(summary.curve, width, blocks=blocks), style="cyan"),
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


Order = Literal["calls", "name", "value", "gradient", "zeros", "nonfinite", "update"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, slots=True)
class Summary:
    """A place in numbers: None where there is none, and NaN where no element was finite at the last step.

    Attributes:
        place: which.
        value: last value of the statistic, of the place's value.
        gradient: the same, of its gradient.
        curve: the statistic over all steps, shape (n,): of the gradient where there is one, else of the value.
        zeros: share of zeros at the last step, of the value where there is one, else of the gradient.
        nonfinite: NaN and infinite elements over all steps, of all sites of the place.
        update: norm of the last update against that of the weight.
    """

    place: Place
    value: float | None
    gradient: float | None
    curve: FloatArray
    zeros: float | None
    nonfinite: int
    update: float | None


def summarize(
    history: History, sites: Sequence[str] | None = None, statistic: str = "rms", phase: Phase = "train"
) -> list[Summary]:
    """Summaries of all places that have any of the sites: activations in call order, then parameters."""
    sites = history.sites if sites is None else list(sites)
    if not sites:
        return []
    places = sorted(group_places(sites), key=lambda place: place.kind == "parameter")
    numbers = {site: number for number, site in enumerate(sites)}
    names = (statistic, "zero_share", "nonfinite", "update_ratio", "count")
    curves, zeros, nonfinite, ratios, count = (history.matrix(name, sites, phase=phase).values for name in names)
    is_lost = (nonfinite == count) & (count > 0)

    def pick(place: Place, *quantities: Quantity) -> int | None:
        return next((numbers[place.sites[quantity]] for quantity in quantities if quantity in place.sites), None)

    return [
        Summary(
            place,
            value=_last(curves, pick(place, "value"), is_lost),
            gradient=_last(curves, pick(place, "grad"), is_lost),
            curve=curves[pick(place, "grad", "value", "update")],
            zeros=_last(zeros, pick(place, "value", "grad"), is_lost),
            nonfinite=int(sum(np.nansum(nonfinite[numbers[site]]) for site in place.sites.values())),
            update=_last(ratios, pick(place, "update"), is_lost),
        )
        for place in places
    ]


def sort_summaries(summaries: Iterable[Summary], order: Order) -> list[Summary]:
    """By name, or by falling numbers, NaN first and unknown ones last; ``calls`` leaves the order as it is.

    Raises:
        PatternError: for an unknown order.
    """
    if order not in ORDERS:
        raise PatternError(f"{order!r} is not a valid order.", repair=f"give one of {', '.join(ORDERS)}.")
    if order == "calls":
        return list(summaries)
    if order == "name":
        return sorted(summaries, key=lambda summary: summary.place.name)
    return sorted(summaries, key=lambda summary: _falling(getattr(summary, order)))


def _falling(number: float | None) -> tuple[bool, float]:
    return (number is None, -np.inf if number is None or np.isnan(number) else -number)


def _last(values: FloatArray, row: int | None, is_lost: npt.NDArray[np.bool_]) -> float | None:
    """Last number of a row, or NaN if that is of elements none of which was finite."""
    if row is None:
        return None
    numbers = np.where(is_lost[row], np.nan, values[row])
    known = np.flatnonzero(~np.isnan(values[row]) | is_lost[row])
    return float(numbers[known[-1]]) if len(known) else None
