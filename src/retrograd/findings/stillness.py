"""Which updates left a parameter as it was, though its gradient says that they should not have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retrograd.findings.detector import CannotTell
from retrograd.findings.record import Record
from retrograd.findings.training import FloatArray, Training, divide

TOLD = 1e-5
"""Share of a weight's norm that an update must have to be more than rounding in single precision."""

BoolArray = npt.NDArray[np.bool_]


class Stillness:
    """Updates of the parameters whose gradients were recorded; arrays of shape ``[parameters, steps]``.

    Args:
        record: what it reads.

    Attributes:
        names: of the parameters.
        steps: at which both were recorded, rising.
        delta: ‖Δw‖₂; NaN where a parameter was not updated.
        is_expected: there was an update, and by its gradient it should have been more than rounding.

    Raises:
        CannotTell: no parameter was changed, or no gradient was recorded.
    """

    def __init__(self, record: Record) -> None:
        updates = record.once(Training).updates
        gradients = [str(site.value.grad) for site in updates.sites]
        known = np.array([name in record.history for name in gradients], np.bool_)
        if not known.any() or not (np.nan_to_num(updates.delta, nan=0.0) > 0).any():
            raise CannotTell("no parameter was changed, or no gradient was recorded")
        norms = record.history.matrix("l2", [name for name, is_known in zip(gradients, known, strict=True) if is_known])
        shared = np.isin(updates.steps, norms.steps)
        self.names = [str(site.value) for site, is_known in zip(updates.sites, known, strict=True) if is_known]
        self.steps = updates.steps[shared]
        self.delta = updates.delta[known][:, shared]
        told = TOLD * updates.weight[known][:, shared]
        expected = _expect(self.delta, norms.values[:, np.isin(norms.steps, updates.steps)])
        self.is_expected: BoolArray = np.isfinite(self.delta) & (expected > told)

    def find_still(self, fewest: int) -> dict[str, int]:
        """Parameters that no update has changed, each with the number of updates that should have."""
        often = self.is_expected.sum(axis=1)
        still = np.where(self.is_expected, self.delta == 0, True).all(axis=1) & (often >= fewest)
        return {self.names[k]: int(often[k]) for k in np.flatnonzero(still)}

    def find_stopped(self, fewest: int) -> dict[str, int]:
        """Parameters that updates had changed and then do not any more, each with the place of the first that does not.

        Others are changed until the end.
        """
        found = {}
        for name, delta, is_expected in zip(self.names, self.delta, self.is_expected, strict=True):
            moved = np.flatnonzero(delta > 0)
            begin = int(moved[-1]) + 1 if len(moved) else 0
            behind = np.flatnonzero(is_expected[begin:]) + begin
            others = (self.delta[:, behind] > 0).any(axis=0)
            if len(moved) >= fewest and len(behind) >= fewest and bool(np.all(others)):
                found[name] = begin
        return found


def _expect(delta: FloatArray, gradients: FloatArray) -> FloatArray:
    """What ‖Δw‖ would be if it were to the gradient as that of the median parameter."""
    per_gradient = divide(np.where(delta > 0, delta, np.nan), gradients)
    known = np.isfinite(per_gradient).any(axis=0)
    usual = np.zeros(delta.shape[1])
    usual[known] = np.nanmedian(per_gradient[:, known], axis=0)
    with np.errstate(invalid="ignore"):  # what is not finite stays so
        return np.asarray(gradients * usual)
