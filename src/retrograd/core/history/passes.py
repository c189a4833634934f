"""Backward passes: which rows are of the first one that reached their site in its micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.core.history.rows import Part
from retrograd.core.history.steps import number_steps

Mask = npt.NDArray[np.bool_]

_OF_MOMENT = ("step", "site", "micro", "phase", "rank")
"""Columns in which the rows of a site's passes in a micro-batch are alike."""


class FirstPasses:
    """Chooses among rows of gradients, and all rows of values, piece by piece.

    A gradient penalty asks ``autograd.grad`` for the gradient of an input first: parameters are reached by the second
    pass alone, and that is the first one for them. The passes of a step may lie in several pieces, each of one rank,
    with other sites and steps in between. Of a site steps never fall: of each those of the last step are remembered.
    """

    def __init__(self) -> None:
        self._rank = -1
        self._last: Part | None = None
        """Of each site of the rank the rows of passes in its last step."""

    def choose(self, piece: Part) -> Mask:
        """Return for each row whether it is of a value, or of the first pass with a gradient of its site."""
        passes = np.asarray(piece["backward"])
        if not len(passes):
            return _NO_ROWS
        rank = int(piece["rank"][0])
        if rank != self._rank:
            self._rank, self._last = rank, None
        known = [] if self._last is None else [self._last]
        first = choose_first([*known, piece])[-len(passes) :] if (passes > 0).any() else np.ones(len(passes), np.bool_)
        if (passes >= 0).any():
            self._last = _pick_last([*known, _pick(piece, passes >= 0)])
        return first


def choose_first(pieces: list[Part]) -> Mask:
    """Return for each row of some pieces, in order, whether it is of a value or of a first pass."""
    passes = _join(pieces, "backward")
    first = passes <= 0
    if first.all():
        return first
    steps = _join(pieces, "step")
    index = np.flatnonzero((passes >= 0) & np.isin(steps, number_steps(steps[~first])[0]))
    keys = [passes[index], *(_join(pieces, name)[index] for name in _OF_MOMENT)]
    order = np.lexsort(keys)
    is_begin = np.zeros(len(order), np.bool_)
    for key in keys[1:]:
        is_begin[1:] |= np.diff(key[order]) != 0
    is_begin[0] = True
    least = keys[0][order][is_begin][np.cumsum(is_begin) - 1]
    first[index[order]] = keys[0][order] == least
    return first


_NO_ROWS = np.empty(0, np.bool_)


def _pick_last(pieces: list[Part]) -> Part:
    """Of each site the rows of its last step."""
    rows = {name: _join(pieces, name) for name in (*_OF_MOMENT, "backward")}
    last = np.full(int(rows["site"].max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, rows["site"], rows["step"])
    return _pick(rows, rows["step"] == last[rows["site"]])


def _pick(piece: Part, rows: Mask) -> Part:
    return {name: np.asarray(piece[name])[rows] for name in (*_OF_MOMENT, "backward")}


def _join(pieces: list[Part], name: str) -> npt.NDArray[Any]:
    return np.concatenate([piece[name] for piece in pieces])
