"""Pictures of kept tensors on a page: the last few of each series, in as many cells as are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrograd.core.errors import RunError
from retrograd.core.history.kept import Kept
from retrograd.core.views.page.frame import pack_json
from retrograd.core.views.report.scope import Scope

if TYPE_CHECKING:
    import torch

_LAST, _MOST_BYTES = 4, 256 << 20
"""Tensors of a series, and bytes that are read for a page, beyond which later series have none."""

_ROWS, _COLUMNS = 32, 96
"""Cells of a picture, at most; a cell that holds several elements has the largest of them by magnitude."""

_LEVELS = 127
"""Shades of each sign; a cell is one of −127 … 127, or :data:`_BROKEN`."""

_BROKEN = 128


def pack_pictures(scope: Scope) -> str | None:
    """What is drawn of the tensors of each series that has any; None where none was kept."""
    series: dict[int, list[dict[str, Any]]] = {}
    room = _MOST_BYTES
    for number, site in enumerate(scope.sites):
        for each in list(scope.history[site].tensors)[-_LAST:]:
            if room > 0:
                told, size = describe_picture(each)
                series.setdefault(number, []).append(told)
                room -= size
    return pack_json(series) if series else None


def describe_picture(kept: Kept) -> tuple[dict[str, Any], int]:
    """A kept tensor: when, and its cells, row by row, without cells where it is lost; and how many bytes it has."""
    told: dict[str, Any] = {"step": kept.step, "micro": kept.micro, "call": kept.call, "phase": kept.phase}
    try:
        tensor = kept.tensor
    except RunError:
        return told | {"why": "its file cannot be read"}, 0
    if tensor is None:
        return told | {"why": "changed in place after it was kept"}, 0
    told["shape"] = list(tensor.shape)
    if tensor.numel() == 0:
        return told | {"why": "it has no elements"}, 0
    plane = _lay_flat(tensor)
    cells = _reduce(plane)
    is_finite = np.isfinite(cells)
    finite = np.where(is_finite, cells, 0.0)
    bound = float(np.abs(finite).max())
    shades = np.where(is_finite, np.rint(finite / (bound or 1.0) * _LEVELS), _BROKEN)
    return told | {
        "first": max(tensor.dim() - 2, 0),
        "bound": bound,
        "columns": cells.shape[1],
        "cells": shades.astype(int).ravel().tolist(),
    }, tensor.numel() * tensor.element_size()


def _lay_flat(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    """The last two dimensions, the first of all others; magnitudes of what is complex."""
    while tensor.dim() > 2:
        tensor = tensor[0]
    tensor = tensor.detach().cpu().to_dense()
    plane: npt.NDArray[np.float64] = (tensor.abs() if tensor.is_complex() else tensor).double().numpy()
    return plane.reshape(1, -1) if plane.ndim < 2 else plane


def _reduce(plane: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each cell the element of the largest magnitude; not finite where any is not."""
    for axis, most in ((0, _ROWS), (1, _COLUMNS)):
        n = plane.shape[axis]
        if n > most:
            starts = (np.arange(most) * n) // most
            high = np.maximum.reduceat(plane, starts, axis=axis)
            low = np.minimum.reduceat(plane, starts, axis=axis)
            plane = np.where(np.abs(high) >= np.abs(low), high, low)
    return plane
