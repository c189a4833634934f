"""What was recorded, in a notebook: a history, one site, a map of sites and steps; findings, and plans."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from retrograd.core.amounts import count_of
from retrograd.core.history.arrays import read_numbers
from retrograd.core.history.curve import Curve
from retrograd.core.history.history import History
from retrograd.core.history.matrix import Matrix
from retrograd.core.history.scalars import Scalars
from retrograd.core.history.series import Series
from retrograd.core.recording.settings import RecordingPlan
from retrograd.core.runs.findings import Finding, Findings, Severity, list_grounds, list_place, tell_repair
from retrograd.core.runs.reader import Run
from retrograd.core.views.downsample import FloatArray, reduce_columns
from retrograd.core.views.notebook.page import MOST_ROWS, Markup, NotebookPage, draw_table, escape
from retrograd.core.views.table import print_table
from retrograd.core.views.terminal import draw_sparkline, make_table, print_loss, print_number, print_quantity

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
    if len(history.rows) and history.rows.count:
        print_table(history, most=MOST_ROWS, file=page)
    else:
        page.console.print(repr(history))


def draw_sites(chosen: tuple[History, list[str]]) -> str:
    """A line for each of the first places of some sites."""
    page = NotebookPage()
    print_table(*chosen, most=MOST_ROWS, file=page)
    return page.as_html()


def draw_scalars(scalars: Scalars) -> str:
    """A line for each of them: its curve, and its last, smallest and largest number."""
    page, table, last = NotebookPage(), scalars.to_arrow(), scalars.last
    rows = [
        _list_numbers(
            name, read_numbers(table[name]), last[name], partial(print_quantity, unit=scalars.about(name).unit)
        )
        for name in scalars
    ]
    _print_curves(page, read_numbers(table["step"]), "scalar", rows)
    return page.as_html()


def draw_curve(curve: Curve) -> str:
    """Its curve, and its last, smallest and largest number."""
    page, values = NotebookPage(), curve.values
    _print_curves(page, curve.steps, "", [_list_numbers("", values, values[-1], print_loss)] if len(values) else [])
    return page.as_html()


def draw_series(series: Series) -> str:
    """A line for each statistic: its curve, and its last, smallest and largest number."""
    page = NotebookPage()
    page.console.print(series.site, style="bold")
    read = {name: series.statistic(name) for name in _STATISTICS}
    rows = [
        _list_numbers(name, values, values[-1], print_number)
        for name, values in read.items()
        if not np.isnan(values).all()
    ]
    _print_curves(page, series.steps, "statistic", rows)
    return page.as_html()


def _print_curves(page: NotebookPage, steps: npt.NDArray[np.int64], title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print the first and the last step, and a table of curves."""
    if not len(steps):
        page.console.print("no steps")
        return
    page.console.print(f"{count_of(len(steps), 'step')}, {steps[0]:,} to {steps[-1]:,}", style="dim")
    titles = {title: "name", "over steps": "text", "last": "number", "min": "number", "max": "number"}
    page.console.print(make_table(page.console, titles, rows))


def _list_numbers(name: str, values: FloatArray, last: float, show: Callable[[float], str]) -> list[str]:
    low, high = np.nanmin(values, initial=np.inf), np.nanmax(values, initial=-np.inf)
    curve = draw_sparkline(values, 40, logarithmic=name not in _LINEAR and bool(low >= 0))
    return [name, curve, show(last), *(show(float(each)) if low <= high else "-" for each in (low, high))]


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


# ---- findings, and plans of recordings ----

_SIDES: dict[Severity, str] = {"critical": "#d9534f", "warning": "#b07d00", "note": "#2391ad"}


def draw_recording_plan(plan: RecordingPlan) -> str:
    """The sites that would be recorded, and what they take."""
    page = NotebookPage()
    page.console.print(plan.total, style="bold")
    columns = {"site": "name", "module": "text", "elements": "number", "kept": "text"}
    page.console.print(make_table(page.console, columns, [site.describe() for site in plan.sites]))
    return page.as_html()


def draw_findings(findings: Findings) -> str:
    """Each finding with its place, and its grounds folded away."""
    page = NotebookPage()
    page.console.print(findings.headline)
    items = "".join(map(_draw_finding, findings))
    if items:
        page.console.add(f'<ol style="padding-left:1.5em">{items}</ol>')
    return page.as_html()


def _draw_finding(finding: Finding) -> str:
    place = " · ".join((*list_place(finding), finding.detector))
    grounds = [*([("to do", tell_repair(finding))] if finding.repair else []), *list_grounds(finding)]
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in grounds)
    return (
        f'<li style="border-left:3px solid {_SIDES[finding.severity]};padding-left:.6em;margin:.4em 0">'
        f"<b>{escape(finding.severity)}</b> {escape(finding.message)}<br><small>{escape(place)}</small>"
        f"<details><summary>evidence</summary><dl>{lines}</dl></details></li>"
    )
