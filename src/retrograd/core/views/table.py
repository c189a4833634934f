"""A run as a table in the terminal: a line for each place, with its last numbers and its curve over the steps."""

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

from retrograd.core.amounts import count_more, count_of
from retrograd.core.errors import PatternError
from retrograd.core.history.history import History
from retrograd.core.history.sink import Phase
from retrograd.core.runs.reader import Given, read_history
from retrograd.core.sites.site import Quantity
from retrograd.core.views.downsample import FloatArray
from retrograd.core.views.shown import LOSS_ALONE, ModelPlace, choose_sites, find_phase, group_places
from retrograd.core.views.terminal import (
    BLOCKS,
    PIPED_WIDTH,
    PLAIN_BLOCKS,
    can_print,
    draw_sparkline,
    giving_text,
    make_table,
    open_console,
    print_loss,
    print_number,
    print_share,
)

SPARKLINE_WIDTH = 24
NARROWEST_SPARKLINE = 8

_COLUMNS = {
    "site": "name",
    "value": "number",
    "gradient": "number",
    "over steps": "text",
    "zeros": "number",
    "nonfinite": "number",
    "update": "number",
}
_SPARED = ("zeros", "update", "value", "over steps", "nonfinite")
"""Columns that are left out, empty ones first and then in this order, where there is little room."""


def print_table(
    run: Given,
    sites: Iterable[str] | None = None,
    *,
    statistic: str = "rms",
    sort: Order = "calls",
    most: int | None = None,
    file: TextIO | None = None,
) -> None:
    """Print a line for each place: its last value and gradient, the gradient over the steps, and what is odd.

    Numbers are of the finite elements; NaN stands where none was finite at the last step, not the number before.
    For a terminal the table is coloured and as wide as the window; a narrow window leaves out columns. For a pipe it is
    plain and nothing is cut.

    Args:
        run: a run, its folder, a recording, or a history.
        sites: names or globs, as in ``blocks.*:output.grad``; all sites when left out.
        statistic: the statistic of the columns ``value``, ``gradient`` and ``over steps``.
        sort: ``calls`` for call order, ``name``, or a column to sort by, largest first.
        most: so many lines at most; in call order, or by name, the sites of others are not read.
        file: where to print; standard output when left out.

    Raises:
        NoSuchSiteError: for a pattern that matches nothing; the nearest sites are named.
        StatisticError: for a statistic that was not recorded.
        PatternError: for an unknown order.
    """
    history = read_history(run)
    places = list_places(choose_sites(history, sites), sort)
    read = places[:most] if sort in ("calls", "name") else places
    phase = find_phase(history)
    summaries, steps = summarize(history, [site for place in read for site in place.sites.values()], statistic, phase)
    summaries = sort_summaries(summaries, sort)[:most]
    if phase == "train":
        steps = history.made_steps[[0, -1]].tolist() if len(history.made_steps) else []
    console = open_console(file)
    span = f"steps {steps[0]:,} to {steps[-1]:,}" if steps else "no steps"
    console.print(
        f"{count_of(len(places), 'site')}, {span}, {statistic}, phase {phase}{_describe_loss(history)}", style="dim"
    )
    if not history.sites and len(history.loss.values):
        console.print(LOSS_ALONE)
        return
    table, left_out = _fit(summaries, console)
    console.print(table)
    if left_out:
        console.print(f"not shown, because the window is too narrow: {', '.join(left_out)}", style="dim")
    if len(summaries) < len(places):
        how = ": retrograd view --all" if file is None else ""
        console.print(count_more(len(places) - len(summaries), "site") + how, style="dim")


format_table = giving_text(print_table)


def _describe_loss(history: History) -> str:
    """The loss of the last step that was made; where it is not finite, since which step."""
    steps, values = history.made_loss
    if not len(values):
        return ""
    finite = np.flatnonzero(np.isfinite(values))
    first = int(finite[-1]) + 1 if len(finite) else 0
    if first == len(values):
        return f", loss {print_loss(float(values[-1]))}"
    word = "NaN" if np.isnan(values[-1]) else "infinite"
    return f", loss {word} since step {steps[first]:,}"


def _fit(summaries: list[Summary], console: Console) -> tuple[Table, list[str]]:
    """The table in as many columns as the window has room for, with the longest curves that fit; and what is left out.

    Names fold only where the narrowest table is too wide.
    """
    titles, left_out = list(_COLUMNS), list[str]()
    empty = _find_empty(summaries)
    for spared in (None, *sorted(_SPARED, key=lambda title: title not in empty)):
        if spared is not None:
            titles.remove(spared)
            left_out.append(f"{spared} (none)" if spared in empty else spared)
        table = _tabulate(summaries, titles, NARROWEST_SPARKLINE, console)
        wanted = console.measure(table, options=console.options.update(width=PIPED_WIDTH)).maximum
        room = console.width - wanted
        if room >= 0:
            width = min(SPARKLINE_WIDTH, NARROWEST_SPARKLINE + room)
            return _tabulate(summaries, titles, width, console), left_out
    return table, left_out


def _find_empty(summaries: Sequence[Summary]) -> set[str]:
    """Columns that hold nothing but dashes."""
    has_any = {
        "zeros": any(summary.zeros is not None for summary in summaries),
        "update": any(summary.update is not None for summary in summaries),
        "nonfinite": any(summary.nonfinite for summary in summaries),
        "value": any(summary.value is not None for summary in summaries),
    }
    return {title for title, is_there in has_any.items() if not is_there}


def _tabulate(summaries: Iterable[Summary], titles: Sequence[str], width: int, console: Console) -> Table:
    blocks = BLOCKS if can_print(console, BLOCKS) else PLAIN_BLOCKS
    cells = (
        {
            "site": summary.place.name,
            "value": _mark(summary.value),
            "gradient": _mark(summary.gradient),
            "over steps": Text(draw_sparkline(summary.curve, width, blocks=blocks), style="cyan"),
            "zeros": "-" if summary.zeros is None else print_share(summary.zeros),
            "nonfinite": Text(f"{summary.nonfinite:,}", style="bold red") if summary.nonfinite else "-",
            "update": _mark(summary.update),
        }
        for summary in summaries
    )
    columns = {title: _COLUMNS[title] for title in titles}
    return make_table(console, columns, ([row[title] for title in titles] for row in cells))


def _mark(number: float | None) -> Text:
    """A number, a dash for None, and NaN in red."""
    if number is not None and math.isnan(number):
        return Text("NaN", style="bold red")
    return Text("-" if number is None else print_number(number))


Order = Literal["calls", "name", "value", "gradient", "zeros", "nonfinite", "update"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, slots=True)
class Summary:
    """A place in numbers: None for a missing number, and NaN where no element was finite at the last step.

    Attributes:
        place: the place.
        value: last value of the statistic, of the place's value.
        gradient: the same, of its gradient.
        curve: the statistic over all steps, shape (n,): of the gradient where there is one, else of the value.
        zeros: share of zeros at the last step, of the value if there is one, else of the gradient.
        nonfinite: number of NaN and infinite elements over all steps, of all sites of the place.
        update: norm of the last update relative to that of the weight.
    """

    place: ModelPlace
    value: float | None
    gradient: float | None
    curve: FloatArray
    zeros: float | None
    nonfinite: int
    update: float | None


def summarize(
    history: History, sites: Sequence[str] | None = None, statistic: str = "rms", phase: Phase = "train"
) -> tuple[list[Summary], list[int]]:
    """Read summaries of all places that have any of the sites, in one pass.

    Returns:
        Activations in call order, then parameters; and steps, of which the first and the last are those of the sites.
    """
    sites = history.sites if sites is None else list(sites)
    places = list_places(sites)
    numbers = {site: number for number, site in enumerate(sites)}

    def pick(place: ModelPlace, *quantities: Quantity) -> int:
        return next((numbers[place.sites[quantity]] for quantity in quantities if quantity in place.sites), len(sites))

    drawn = [pick(place, "grad", "value", "update") for place in places]
    names = (statistic, "zero_share", "update_ratio", "nonfinite", "count")
    last, nonfinite, curves, steps = _LastNumbers(3, len(sites)), np.zeros(len(sites)), list[FloatArray](), list[int]()
    for matrices in history.matrices(names, sites, phase) if sites else ():
        *shown, bad, count = matrices
        is_lost = (bad.values == count.values) & (count.values > 0)
        last.add([each.values for each in shown], is_lost)
        nonfinite += np.nansum(bad.values, axis=1)
        curves.append(shown[0].values[drawn])
        steps += count.steps[[0, -1]].tolist() if len(count.steps) else []
        del matrices, shown, bad, count
    joined = np.concatenate(curves, axis=1) if curves else np.empty((len(drawn), 0))
    del curves
    summaries = [
        Summary(
            place,
            value=last.of(0, pick(place, "value")),
            gradient=last.of(0, pick(place, "grad")),
            curve=curve,
            zeros=last.of(1, pick(place, "value", "grad")),
            nonfinite=int(sum(nonfinite[numbers[site]] for site in place.sites.values())),
            update=last.of(2, pick(place, "update")),
        )
        for place, curve in zip(places, joined, strict=True)
    ]
    return summaries, steps


class _LastNumbers:
    """Of some statistics the last number of each site, NaN where none of its elements was finite then.

    Args:
        statistics: how many.
        sites: how many; one more has no number.
    """

    def __init__(self, statistics: int, sites: int) -> None:
        self._numbers = np.full((statistics, sites + 1), np.nan)
        self._is_known = np.zeros((statistics, sites + 1), np.bool_)

    def add(self, statistics: Sequence[FloatArray], is_lost: npt.NDArray[np.bool_]) -> None:
        """Take in the next steps: of each statistic, and whether no element was finite, shape ``[sites, steps]``."""
        for line, values in enumerate(statistics):
            known = ~np.isnan(values) | is_lost
            place = values.shape[1] - 1 - known[:, ::-1].argmax(axis=1) if values.shape[1] else 0
            has_any = np.flatnonzero(known.any(axis=1))
            at = has_any, np.broadcast_to(place, len(values))[has_any]
            self._numbers[line, has_any] = np.where(is_lost[at], np.nan, values[at])
            self._is_known[line, has_any] = True

    def of(self, statistic: int, site: int) -> float | None:
        """The last number of a site; None where it has none."""
        return float(self._numbers[statistic, site]) if self._is_known[statistic, site] else None


def list_places(sites: Iterable[str], order: Order = "calls") -> list[ModelPlace]:
    """Activations in call order, then parameters; or all by name.

    Raises:
        PatternError: for an unknown order.
    """
    _check_order(order)
    return sorted(group_places(sites), key=lambda place: place.name if order == "name" else place.kind == "parameter")


def _check_order(order: Order) -> None:
    if order not in ORDERS:
        raise PatternError(f"{order!r} is not a valid order.", repair=f"give one of {', '.join(ORDERS)}.")


def sort_summaries(summaries: Iterable[Summary], order: Order) -> list[Summary]:
    """Sort by name, or by falling numbers, NaN first and unknown ones last; ``calls`` leaves the order as it is.

    Raises:
        PatternError: for an unknown order.
    """
    _check_order(order)
    if order == "calls":
        return list(summaries)
    if order == "name":
        return sorted(summaries, key=lambda summary: summary.place.name)
    return sorted(summaries, key=lambda summary: _falling(getattr(summary, order)))


def _falling(number: float | None) -> tuple[bool, float]:
    return (number is None, -np.inf if number is None or np.isnan(number) else -number)
