"""The sums of squares of weights, to the bit as updates are recorded with them: what weights are known again by."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from retrograd.core.ranks.placements import own_values
from retrograd.core.statistics.row import ROW
from retrograd.core.statistics.slab import UnreadableTensorError, copy_elements, make_slab


def sum_squares(models: Iterable[nn.Module]) -> npt.NDArray[np.float64]:
    """For each parameter that this process holds, the sum of its squares; none for those that are zero, or not there.

    It waits for the device.
    """
    parameters = {id(each): each for model in models for each in nn.Module.parameters(model)}
    found = [_sum_squares(each) for each in parameters.values()]
    return np.array([total for total in found if total > 0], np.float64)


def _sum_squares(parameter: torch.Tensor) -> float:
    try:
        weight = own_values(parameter)
        slab = make_slab(weight.device)
        slab.grow(1)
        (copy,) = copy_elements([weight], [])
        slab.observe_update(weight, weight if copy is None else copy, 0)
    except (UnreadableTensorError, ValueError, RuntimeError):
        return 0.0
    rows, _ = slab.drain()
    return float(np.frombuffer(rows, ROW)["reference"].sum())
