"""The loss of a run as a list of runs draws it: a few hundred means, and where it ends, from files of events alone."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from retrograd.core.errors import RunError
from retrograd.core.history.curve import Curve
from retrograd.core.history.events import LossSums, pick_kinds, read_losses
from retrograd.core.history.table import OF_LOSSES, find_made
from retrograd.core.limits import LIMITS
from retrograd.core.runs.layout import EVENTS, find_rank_folders, is_extra, list_parts
from retrograd.core.runs.listing import read_events

POINTS = 240
"""Of a curve, at most."""

_LAST_SHARE = 20
"""The final loss is the mean over one of so many parts of the steps: one batch says little."""


class LossCurve(NamedTuple):
    """The loss of a run, over its micro-batches and ranks.

    Attributes:
        first: the first step.
        width: how many steps share a value.
        values: float64, shape ``[n]``: their mean; NaN where one is not finite, or none is known.
        final: mean of the losses of the last twentieth of the steps; NaN where one of them is not finite, None where
            there is none.
        logged: the last number of ``eval_loss`` and of each name that the program has logged.
    """

    first: int
    width: int
    values: npt.NDArray[np.float64]
    final: float | None
    logged: dict[str, float]

    def as_facts(self) -> dict[str, Any]:
        """The same as JSON values: None for what is not finite, and text where it is the final loss."""
        digits = [float(f"{value:.4g}") if np.isfinite(value) else None for value in self.values]
        final = self.final if self.final is None or np.isfinite(self.final) else str(self.final)
        logged = {name: value if np.isfinite(value) else str(value) for name, value in self.logged.items()}
        return {"first": self.first, "width": self.width, "values": digits, "final": final, "logged": logged}


NO_CURVE = LossCurve(0, 1, np.empty(0), None, {})


def read_curve(run: Path) -> LossCurve | None:
    """The loss of a run; None where its files are so large, or torn, that a list does not read them."""
    with contextlib.suppress(OSError, ValueError, RunError):
        folders = find_rank_folders(run)
        counted = [each for each in folders if len(folders) == 1 or not is_extra(each.name)]
        paths = [path for folder in counted for _, path in list_parts(folder / EVENTS)]
        if sum(path.stat().st_size for path in paths) > LIMITS.listed_bytes:
            return None
        columns = list(dict.fromkeys((*OF_LOSSES, "name", "text")))
        tables = list(read_events(paths, columns))
        if not tables:
            return NO_CURVE
        table = pa.concat_tables(tables).unify_dictionaries()
        sums, made = LossSums(), find_made(table)
        sums.add(read_losses(table))
        steps, values = sums.finish()
        end = int(np.searchsorted(steps, made.max(), side="right")) if len(made) else len(steps)
        return reduce_curve(Curve(steps[:end], values[:end]))._replace(logged=_find_logged(table))
    return None


def reduce_curve(curve: Curve) -> LossCurve:
    """A curve in few values."""
    steps, values = curve
    if not len(steps):
        return NO_CURVE
    first, width = int(steps[0]), -(-(int(steps[-1]) - int(steps[0]) + 1) // POINTS)
    column = (steps - first) // width
    count = np.bincount(column)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.bincount(column, np.where(np.isfinite(values), values, np.nan)) / count
        final = values[-max(1, len(values) // _LAST_SHARE) :].mean()
    return LossCurve(first, width, means, float(final), {})


def _find_logged(table: pa.Table) -> dict[str, float]:
    found = pick_kinds(table, ["step", "name", "value", "text"], ("scalar",))
    last: dict[str, tuple[int, float]] = {}
    rows = zip(*(found[name].to_pylist() for name in ("step", "name", "value", "text")), strict=True)
    for step, name, value, text in rows:
        if (name == "eval_loss" or not text) and step >= last.get(name, (-1, 0.0))[0]:
            last[name] = step, value
    return {name: value for name, (_, value) in last.items()}
