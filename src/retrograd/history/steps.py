"""The different ones among many steps: these are mostly dense, and found without the sorting of ``np.unique``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def number_steps(steps: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The different steps, rising, and for each entry which of them it is."""
    if not len(steps):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if (np.diff(steps) > 0).all():
        return steps.astype(np.int64), np.arange(len(steps))
    low, high = int(steps.min()), int(steps.max())
    if high - low > 4 * len(steps):
        different, number = np.unique(steps, return_inverse=True)
        return different, number.astype(np.int64)
    seen = np.zeros(high - low + 1, np.bool_)  # steps are usually dense, and then need no sorting
    seen[steps - low] = True
    return np.flatnonzero(seen) + low, (np.cumsum(seen) - 1)[steps - low]
