"""What was recorded, in a notebook: a history, one site, and a map of sites and steps."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import numpy.typing as npt

from retrograd.core.amounts import count_of
from retrograd.core.history.history import History
from retrograd.core.history.matrix import Matrix
from retrograd.core.history.scalars import Scalars
from retrograd.core.history.series import Series
from retrograd.core.runs.reader import Run
from retrograd.core.views.downsample import FloatArray, reduce_columns
from retrograd.core.views.notebook.page import MOST_ROWS, Markup, NotebookPage, draw_table
from retrograd.core.views.shown import group_places
from retrograd.core.views.table import print_table
from retrograd.core.views.terminal import draw_sparkline, make_table, print_loss, print_number

_STATISTICS = ("rms", "mean", "std", "abs_max", "zero_share", "nonfinite", "update_ratio")
_LINEAR = ("mean", "zero_share", "nonfinite")
"""Statistics that may be negative, or are often zero."""

_WIDTH = 160
"""Columns of a map."""

_RAMP = ("132350", "1d4b8c", "2277a8", "35a09f", "77c793", "c4e59f", "f6f8d3")
_ZERO, _NONFINITE = (128, 128, 128, 110), (217, 83, 79, 255)


def draw_history(history: History) -> str:
    """The loss, and a line for each of the first places."""
    page = NotebookPage()
    add_history(page, history)
    return page.as_html()


def draw_run(run: Run) -> str:
    """The folder and how it fares, and its history."""
    page = NotebookPage()
    page.console.print(f"{run.path}: {run.status}", style="bold")
    add_history(page, run.history)
    return page.as_html()


def add_history(page: NotebookPage, history: History) -> None:
    """Print a history, with no more sites than are shown."""
    loss = history.made_loss.values
    if len(loss):
        page.console.print(f"loss {print_loss(float(loss[-1]))}  {draw_sparkline(loss, 40)}")
    places = group_places(history.sites)
    shown = [site for place in places[:MOST_ROWS] for site in place.sites.values()]
    if len(history.rows) and history.rows.count:
        print_table(history, shown, file=page)
    else:
        page.console.print(repr(history))
    if len(places) > MOST_ROWS:
        page.console.print(f"and {len(places) - MOST_ROWS:,} more sites", style="dim")


def draw_series(series: Series) -> str:
    """A line for each statistic: its curve, and its last, smallest and largest number."""
    page = NotebookPage()
    page.console.print(series.site, style="bold")
    steps = series.steps
    if not len(steps):
        page.console.print("no steps")
        return page.as_html()
    page.console.print(f"{count_of(len(steps), 'step')}, {steps[0]:,} to {steps[-1]:,}", style="dim")
    rows = [_list_numbers(name, series.statistic(name)) for name in _STATISTICS]
    titles = {"statistic": "name", "over steps": "text", "last": "number", "min": "number", "max": "number"}
    page.console.print(make_table(page.console, titles, [row for row in rows if row is not None]))
    return page.as_html()


def _list_numbers(name: str, values: FloatArray) -> list[str] | None:
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    numbers = (values[-1], known.min(), known.max())
    curve = draw_sparkline(values, 40, logarithmic=name not in _LINEAR)
    return [name, curve, *(print_number(float(number)) for number in numbers)]


def draw_scalars(scalars: Scalars) -> str:
    """A line for each: its curve, its last number, and of how many steps it is."""
    page = NotebookPage()
    titles = {"scalar": "name", "last": "number", "unit": "text", "steps": "number", "over steps": "text"}
    rows = [
        (
            name,
            print_number(float(values[-1])),
            scalars.about(name).unit,
            f"{len(steps):,}",
            draw_sparkline(values, 40, logarithmic=not scalars.is_logged(name)),
        )
        for name, (steps, values) in scalars.items()
    ]
    page.console.print(make_table(page.console, titles, rows) if rows else "no scalars")
    return page.as_html()


def draw_matrix(matrix: Matrix) -> str:
    """A strip of colours for each site, on one logarithmic scale; zero is grey, what is not recorded is left out."""
    shown = matrix.values[:MOST_ROWS]
    if not shown.size:
        return NotebookPage().as_html()
    magnitudes = reduce_columns(np.abs(shown), max(1, -(-shown.shape[1] // _WIDTH))).high
    colours, low, high = colour_map(magnitudes)
    listed = zip(matrix.sites, colours, shown, strict=False)
    rows = [(site, Markup(draw_strip(strip)), _last(line)) for site, strip, line in listed]
    page = NotebookPage()
    steps = f"steps {matrix.steps[0]:,} to {matrix.steps[-1]:,}"
    scale = f"; |x| from {print_number(low)} (dark) to {print_number(high)} (light)" if low <= high else ""
    page.console.print(f"{count_of(len(matrix.sites), 'site')}, {steps}{scale}; zero is grey", style="dim")
    page.console.add(draw_table([("site", False), ("over steps", False), ("last", True)], rows))
    if len(matrix.sites) > MOST_ROWS:
        page.console.print(f"and {len(matrix.sites) - MOST_ROWS:,} more", style="dim")
    return page.as_html()


def _last(line: FloatArray) -> str:
    known = line[~np.isnan(line)]
    return print_number(float(known[-1])) if len(known) else "-"


def colour_map(magnitudes: FloatArray) -> tuple[npt.NDArray[np.uint8], float, float]:
    """Colours of magnitudes, shape ``[n, m, 4]``, and those that the darkest and the lightest stand for."""
    usable = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    low, high = (float(usable.min()), float(usable.max())) if len(usable) else (1.0, 0.0)
    ramp = np.array([[*bytes.fromhex(colour), 255] for colour in _RAMP], np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (np.log(magnitudes) - np.log(low)) / max(np.log(high / low), 1e-9) if len(usable) else magnitudes
    place = np.clip(np.nan_to_num(share, posinf=0, neginf=0), 0, 1) * (len(ramp) - 1)
    below = np.minimum(place.astype(int), len(ramp) - 2)
    part = (place - below)[..., None]
    colours = (ramp[below] * (1 - part) + ramp[below + 1] * part).astype(np.uint8)
    colours[magnitudes == 0] = _ZERO
    colours[np.isinf(magnitudes)] = _NONFINITE
    colours[np.isnan(magnitudes)] = 0
    return colours, low, high


def draw_strip(colours: npt.NDArray[np.uint8]) -> str:
    """One line of colours, shape ``[m, 4]``, as an image."""
    content = base64.b64encode(_write_png(colours)).decode()
    size = f"width:{min(4 * len(colours), 480)}px;height:1em;max-width:none"
    style = f"{size};image-rendering:pixelated;vertical-align:middle;margin:0"
    return f'<img alt="" style="{style}" src="data:image/png;base64,{content}">'


def _write_png(colours: npt.NDArray[np.uint8]) -> bytes:
    head = struct.pack(">IIBBBBB", len(colours), 1, 8, 6, 0, 0, 0)
    line = zlib.compress(b"\0" + colours.tobytes())
    return b"\x89PNG\r\n\x1a\n" + _pack(b"IHDR", head) + _pack(b"IDAT", line) + _pack(b"IEND", b"")


def _pack(kind: bytes, body: bytes) -> bytes:
    """A part of such a file: its length, kind, contents and sum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
