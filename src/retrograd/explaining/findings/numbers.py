"""Numbers of which some are not known."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def divide(numerator: Any, denominator: Any) -> FloatArray:
    """Element by element; NaN where the denominator is 0."""
    bottom = np.asarray(denominator, np.float64)
    out = np.full(np.broadcast(numerator, bottom).shape, np.nan)
    with np.errstate(over="ignore", invalid="ignore"):
        np.divide(numerator, bottom, out=out, where=bottom != 0)
    return out


def median(values: Any) -> float:
    """The median of what is finite; NaN where nothing is."""
    known = np.asarray(values, np.float64)
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else np.nan
