"""The map of sites × steps in a terminal: a line a site, darker or brighter where numbers are larger."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TextIO

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from retrograd.core.history.history import History
from retrograd.core.runs.reader import Given, read_history
from retrograd.core.views.downsample import FloatArray, reduce_columns, share_columns
from retrograd.core.views.shown import choose_sites, find_phase
from retrograd.core.views.terminal import can_print, giving_text, open_console, print_name, print_number, shade_numbers

RAMP = "·░▒▓█"
PLAIN_RAMP = ".:-=+*#%@"
NONFINITE = "!"
ZERO = "0"

_COLORS = ("#132350", "#1d4b8c", "#2277a8", "#35a09f", "#77c793", "#c4e59f", "#f6f8d3")
_LEVELS = "0123456"
_PIPED_COLUMNS = 80


def print_heatmap(
    run: Given, sites: Iterable[str] | None = None, *, statistic: str = "rms", file: TextIO | None = None
) -> None:
    """Print a line for each site and a character for each stretch of steps, on one common logarithmic scale.

    A character shows the largest number of its steps; ``!`` stands for elements that were NaN or infinite,
    ``0`` for what is exactly zero.

    Args:
        run: a run, its folder, a recording, or a history.
        sites: names or globs; all gradients of activations when left out, or all sites where there are none.
        statistic: name of the statistic.
        file: where to print; standard output when left out.

    Raises:
        NoSuchSiteError: for a pattern that matches nothing.
        StatisticError: for a statistic that was not recorded.
    """
    history = read_history(run)
    chosen = choose_sites(history, sites) if sites is not None else _default_sites(history)
    phase = find_phase(history)
    matrix, bad = (history.matrix(name, chosen, phase=phase) for name in (statistic, "nonfinite"))
    console = open_console(file)
    if len(matrix.steps) == 0:
        console.print("no steps")
        return
    label = max(len(site) for site in chosen)
    room = (console.width - label - 2) if console.is_terminal else _PIPED_COLUMNS
    columns = share_columns(matrix.steps, max(room, 10))
    is_bad = reduce_columns(bad.values, columns.width).high > 0
    logs, low, high = _take_logs(reduce_columns(matrix.values, columns.width).high)
    for site, line, broken in zip(chosen, logs, is_bad, strict=True):
        console.print(
            Text(f"{print_name(console, site):<{label}}  ").append(_draw_line(console, line, broken, low, high))
        )
    _print_axis(console, label, len(columns), columns.width, (int(matrix.steps[0]), int(matrix.steps[-1])))
    scale = f", log scale, {print_number(10**low)} to {print_number(10**high)}"
    console.print(
        f"{statistic}{_tell_constant(matrix.values) or scale}; a character shows the largest of its steps, "
        f"{NONFINITE} NaN or infinite, {ZERO} exactly zero"
    )


format_heatmap = giving_text(print_heatmap)


def _default_sites(history: History) -> list[str]:
    return [site for site in history.sites if site.endswith(":output.grad")] or history.sites


def _take_logs(values: FloatArray) -> tuple[FloatArray, float, float]:
    """Decimal logarithms of magnitudes, and the range of those above zero; zero is minus infinity."""
    magnitudes = np.abs(values)
    known = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)
    logs = np.log10(np.clip(magnitudes, low, high))
    return np.where(magnitudes == 0, -np.inf, logs), math.log10(low), math.log10(high)


def _tell_constant(values: FloatArray) -> str:
    """The value of numbers that are all the same; empty where they differ, or there are none."""
    known = np.unique(values[np.isfinite(values)])
    return f" is {print_number(float(known[0]))} everywhere" if len(known) == 1 else ""


def _draw_line(console: Console, line: FloatArray, broken: npt.NDArray[np.bool_], low: float, high: float) -> Text:
    colored = console.color_system in ("256", "truecolor")
    ramp = _LEVELS if colored else RAMP if can_print(console, RAMP) else PLAIN_RAMP
    text = Text()
    for shade, is_broken, is_zero in zip(shade_numbers(line, ramp, low, high), broken, line == -np.inf, strict=True):
        if is_broken:
            text.append(NONFINITE, style="bold white on red" if colored else "")
        elif is_zero:
            text.append(ZERO, style="dim" if colored else "")
        elif colored and shade in _LEVELS:
            text.append(" ", style=f"on {_COLORS[int(shade)]}")
        else:
            text.append(shade)
    return text


def _print_axis(console: Console, label: int, drawn: int, width: int, span: tuple[int, int]) -> None:
    first, last = f"step {span[0]:,}", f"{span[1]:,}"
    shared = f"{width} steps a character" if width > 1 else ""
    console.print(f"{'':<{label}}  {first}{shared:^{max(drawn - len(first) - len(last), 1)}}{last}", style="dim")
