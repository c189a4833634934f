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


class JoinedSteps:
    """Rising steps that come some after the other. As long as they are those of a known list they take no memory.

    Args:
        known: steps that somebody holds anyway.
    """

    def __init__(self, known: npt.NDArray[np.int64]) -> None:
        self._known, self._same = known, 0
        self._others: list[npt.NDArray[np.int64]] = []

    def add(self, steps: npt.NDArray[np.int64]) -> None:
        """Take in the next ones."""
        end = self._same + len(steps)
        if not self._others and np.array_equal(self._known[self._same : end], steps):
            self._same = end
        else:
            self._others.append(steps)

    def join(self) -> npt.NDArray[np.int64]:
        """All of them."""
        same = self._known[: self._same]
        return np.concatenate((same, *self._others)) if self._others else same
