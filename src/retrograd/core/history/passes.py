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
    pass alone, and that is the first one for them. The passes of a step may lie in several pieces, each of one rank:
    in the next one where pieces end within a step, or within a site; and in a later part where that one begins with
    the last step of this one.
    """

    def __init__(self) -> None:
        self._rank = self._last = self._end = -1
        self._of_last: list[Part] = []
        """Of each piece of the rank so far the rows of the last step of all."""
        self._cut: list[Part] = []
        """Of the pieces before, those of the step that they have ended with, if that is another one."""

    def choose(self, piece: Part) -> Mask:
        """Return for each row whether it is of a value, or of the first pass with a gradient of its site."""
        steps = piece["step"]
        if not len(steps):
            return _NO_ROWS
        last, end, rank = int(steps.max()), int(steps[-1]), int(piece["rank"][0])
        if rank != self._rank:
            self._rank, self._last, self._of_last, self._cut = rank, -1, [], []
        first = choose_first([*self._of_last, *self._cut, piece])[-len(steps) :]
        if last > self._last:
            self._last, self._of_last = last, []
        if last == self._last:
            self._of_last.append(_pick_step(piece, last))
        before = self._cut if end == self._end else []
        self._cut = [*before, _pick_step(piece, end)] if end != self._last else []
        self._end = end
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


def _pick_step(piece: Part, step: int) -> Part:
    rows = np.flatnonzero(piece["step"] == step)
    return {name: np.asarray(piece[name])[rows] for name in (*_OF_MOMENT, "backward")}


def _join(pieces: list[Part], name: str) -> npt.NDArray[Any]:
    return np.concatenate([piece[name] for piece in pieces])
