"""Conditions on the statistics of a micro-batch that make kept tensors worth writing out.

A trigger is any callable ``(names, rows) -> str``: ``names`` are the printed sites of the rows and ``rows`` their
columns (see :mod:`retrograd.statistics.row`). It returns why it fires, or an empty text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.errors import TensorPolicyError
from retrograd.sites.pattern import Candidate
from retrograd.sites.selection import Selection
from retrograd.sites.site import parse_site
from retrograd.statistics.row import STATISTICS, derive

Rows = Mapping[str, npt.NDArray[Any]]
Trigger = Callable[[Sequence[str], Rows], str]


class _Chosen:
    """Remembers which names a selection wants."""

    def __init__(self, sites: str) -> None:
        self._selection = Selection(sites)
        self._known: dict[str, bool] = {}

    def among(self, names: Sequence[str]) -> npt.NDArray[np.bool_]:
        for name in names:
            if name not in self._known:
                self._known[name] = self._selection.wants(Candidate(parse_site(name)))
        return np.fromiter((self._known[name] for name in names), dtype=bool, count=len(names))


def on_nonfinite(sites: str = "*") -> Trigger:
    """Fires when a NaN or an infinity is seen at one of these sites."""
    chosen = _Chosen(sites)

    def trigger(names: Sequence[str], rows: Rows) -> str:
        found = np.flatnonzero((derive(rows, "nonfinite") > 0) & chosen.among(names))
        return f"{names[found[0]]} is not finite" if len(found) else ""

    return trigger


def on_jump(factor: float = 10.0, sites: str = "*:output.grad", statistic: str = "rms", memory: float = 0.9) -> Trigger:
    """Fires when a statistic exceeds ``factor`` times its own running mean (exponential, ``memory`` a step).

    Values that are not finite neither fire nor enter the mean.

    Raises:
        TensorPolicyError: unless ``factor`` exceeds 1, ``memory`` lies in (0, 1) and the statistic exists.
    """
    if factor <= 1 or not 0 < memory < 1 or statistic not in STATISTICS:
        raise TensorPolicyError(
            f"on_jump(factor={factor!r}, statistic={statistic!r}, memory={memory!r}) can never be right.",
            repair=f"take factor > 1, 0 < memory < 1 and a statistic of {', '.join(STATISTICS)}.",
        )
    chosen = _Chosen(sites)
    means: dict[str, float] = {}

    def trigger(names: Sequence[str], rows: Rows) -> str:
        reason = ""
        values = np.asarray(derive(rows, statistic), dtype=float)
        for index in np.flatnonzero(chosen.among(names) & np.isfinite(values)).tolist():
            name, value = names[index], float(values[index])
            mean = means.get(name)
            if mean is not None and value > factor * mean > 0 and not reason:
                reason = f"{statistic} of {name} jumped to {value:.3g} from {mean:.3g}"
            means[name] = value if mean is None else memory * mean + (1 - memory) * value
        return reason

    return trigger
