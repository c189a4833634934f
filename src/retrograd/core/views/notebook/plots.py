"""Curves and maps on matplotlib axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.core.foreign.text import show_plainly
from retrograd.core.history.curve import Curve
from retrograd.core.history.matrix import Matrix
from retrograd.core.history.series import Series
from retrograd.core.libraries import library_needed

with library_needed("matplotlib", "3.8", "plots"):
    from matplotlib import pyplot
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, LogNorm

_MOST_NAMES = 60
"""Of more sites every other one has its name, or every third …, and a picture is no higher."""

_RED, _GREY = "#d9534f", "#9a9a9a"


def plot_series(series: Series, statistic: str, ax: Axes | None, **line: Any) -> Axes:
    """Draw one statistic over steps; red ticks at the foot mark steps with elements that are not finite."""
    steps, values, lost = series.steps, series.statistic(statistic), series.nonfinite > 0
    axes = _open_axes() if ax is None else ax
    axes.plot(steps, values, **({"label": show_plainly(series.site).replace("$", r"\$")} | line))
    if lost.any():
        foot = axes.get_xaxis_transform()
        axes.plot(steps[lost], np.zeros(int(lost.sum())), "|", color=_RED, transform=foot, clip_on=False, label="_")
    known = values[np.isfinite(values)]
    if len(known) and known.min() > 0 and known.max() > 20 * known.min():
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(statistic)
    if ax is None:
        axes.set_title(show_plainly(series.site), parse_math=False)
    return axes


def plot_curve(curve: Curve, ax: Axes | None, **line: Any) -> Axes:
    """Draw one number a step as a line."""
    axes = _open_axes() if ax is None else ax
    axes.plot(curve.steps, curve.values, **line)
    axes.set_xlabel("step")
    axes.set_ylabel(str(line.get("label", "")))
    return axes


def plot_matrix(matrix: Matrix, ax: Axes | None, **mesh: Any) -> Axes:
    """Draw magnitudes as colours on a logarithmic scale; zero is grey, and what is not finite red."""
    count = len(matrix.sites)
    axes = _open_axes(max(2.0, 0.22 * min(count, _MOST_NAMES) + 1.2)) if ax is None else ax
    sizes = np.abs(matrix.values)
    edges = _find_edges(matrix.steps), np.arange(count + 1) - 0.5
    for mask, colour in ((sizes == 0, _GREY), (np.isinf(sizes), _RED)):
        if mask.any():
            axes.pcolormesh(*edges, np.ma.masked_array(mask, ~mask), cmap=ListedColormap([colour]), rasterized=True)
    usable = np.ma.masked_array(sizes, ~(np.isfinite(sizes) & (sizes > 0)))
    if usable.count():
        options: dict[str, Any] = {"norm": LogNorm(usable.min(), usable.max()), "rasterized": True} | mesh
        drawn = axes.pcolormesh(*edges, usable, **options)
        if axes.figure is not None:
            axes.figure.colorbar(drawn, ax=axes)
    named = range(0, count, max(1, -(-count // _MOST_NAMES)))
    names = [show_plainly(matrix.sites[row]) for row in named]
    axes.set_yticks(named, names, fontsize="small", parse_math=False)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlabel("step")
    return axes


def _open_axes(height: float = 3.0) -> Axes:
    return pyplot.subplots(figsize=(8, height), layout="constrained")[1]


def _find_edges(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Edges of the cells of steps: halfway between two of them."""
    if len(steps) < 2:
        return np.array([*(steps - 0.5), *(steps + 0.5)], np.float64)
    between = (steps[1:] + steps[:-1]) / 2
    return np.array([steps[0] - (between[0] - steps[0]), *between, steps[-1] + (steps[-1] - between[-1])])
