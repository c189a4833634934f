"""How much the updates of a run changed its parameters, added up step after step, and which of them changed nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrograd.core.history.matrix import build_matrix, find_columns
from retrograd.core.history.rows import Rows, encode_phase
from retrograd.core.history.steps import JoinedSteps, number_steps
from retrograd.core.sites.site import Site
from retrograd.core.statistics.row import finite_count
from retrograd.explaining.findings.numbers import divide
from retrograd.explaining.findings.record import CannotTell, Record

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

TOLD = 1e-5
"""Share of a weight's norm that an update must have to be more than rounding in single precision."""

MOST_HELD = 10_000_000
"""Numbers of changes that are held, eight bytes each; more are read whenever they are asked for."""

FIRST = 3
"""Steps whose weights are kept."""


class Norms(NamedTuple):
    """Changes of parameters by optimizers, at some steps: arrays of shape ``[parameters, steps]``.

    Attributes:
        steps: rising.
        delta: ‖Δw‖₂; NaN where a parameter was not updated, infinite where the update is not finite.
        weight: ‖w‖₂ before it.
        elements: NaN where it was not updated.
    """

    steps: IntArray
    delta: FloatArray
    weight: FloatArray
    elements: FloatArray


class UpdateNorms:
    """Changes of parameters by optimizers in training. Of a very long record 8 bytes a step are held, or 16.

    Args:
        record: what it reads.

    Attributes:
        sites: of the updates.
        steps: rising.
        ratio: ‖Δw‖ / ‖w‖ over all parameters of a step, shape ``[steps]``; NaN where all weights are zero.
        elements: of each parameter at the first step, shape ``[parameters]``; NaN where it was not updated then.
        first_weights: ‖w‖₂ before the first three updates, shape ``[parameters, 3]`` at most.
        told: for each parameter how many updates changed it by more than rounding.

    Raises:
        CannotTell: no update was recorded.
    """

    def __init__(self, record: Record) -> None:
        self._history, self._in_part = record.history, record.in_part
        listed = record.of_kind("parameter", "update")
        self.sites = tuple(site for site in listed if record.is_trained(str(site.value)))
        if not self.sites:
            raise CannotTell("no update of a parameter was recorded")
        known = record.history.outline.steps.get(encode_phase("train"), np.empty(0, np.int64))
        steps, ratio, n = JoinedSteps(known), np.empty(len(known)), 0
        self.elements, self.first_weights = np.full(len(self.sites), np.nan), np.empty((len(self.sites), 0))
        self.told = np.zeros(len(self.sites), np.int64)
        self._held: list[Norms] | None = [] if 3 * len(self.sites) * len(known) <= MOST_HELD else None
        self._stillness = Stillness(record, self.sites, known)
        for rows, codes, norms in self._read(self._stillness.gradients):
            self._stillness.add(rows, codes, norms)
            if self._held is not None:
                self._held.append(norms)
            if not n and len(norms.steps):
                self.elements = norms.elements[:, 0].copy()
            head = norms.weight[:, : FIRST - self.first_weights.shape[1]]
            self.first_weights = np.concatenate((self.first_weights, head), axis=1)
            self.told += _describe(norms.delta, norms.weight).sum(axis=1)
            steps.add(norms.steps)
            ratio[n : n + len(norms.steps)] = divide(add_up(norms.delta), add_up(norms.weight))
            n += len(norms.steps)
        self.steps, self.ratio = steps.join(), ratio[:n]

    @property
    def finite_ratio(self) -> FloatArray:
        """``ratio``, 0 where it is not finite: a NaN does not come of too large a step."""
        finite = np.isfinite(self.ratio)
        return self.ratio if finite.all() else np.where(finite, self.ratio, 0.0)

    def norms(self) -> Iterator[Norms]:
        """The changes, for some steps after the other."""
        return (norms for _, _, norms in self._read([])) if self._held is None else iter(self._held)

    @property
    def stillness(self) -> Stillness:
        """Updates that change nothing.

        Raises:
            CannotTell: no parameter was changed, or no gradient was recorded.
        """
        if not self._stillness.has_changed:
            raise CannotTell("no parameter was changed, or no gradient was recorded")
        return self._stillness

    def tell_spans(self, line: int, bounds: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Whether updates changed a parameter, by its place among the sites, between each bound and the next one.

        An update at the step of a bound is behind it.
        """
        counted = np.zeros(len(bounds) + 1, np.int64)
        for norms in self.norms():
            changed = norms.steps[_describe(norms.delta[line], norms.weight[line])]
            counted += np.bincount(np.searchsorted(bounds, changed, "right"), minlength=len(counted))
        return counted[1:-1] > 0

    def _read(self, others: Sequence[str]) -> Iterator[tuple[Rows, list[dict[int, int]], Norms]]:
        """Rows of the updates and of other sites, the codes of these, and the changes."""
        n, line_of = len(self.sites), np.full(len(self._history.site_names) + 1, -1)
        columns = {*_OF_NORMS, *find_columns(["l2"], [])}
        for rows, codes in self._history.merged([*map(str, self.sites), *others], "train", columns):
            for line, of_site in enumerate(codes[:n]):
                line_of[list(of_site)] = line
            norms = _lay_out(rows, line_of, n)
            chosen = self._in_part(norms.steps)
            if not chosen.all():
                norms = Norms(norms.steps[chosen], *(each[:, chosen] for each in norms[1:]))
            yield rows, codes[n:], norms


_FINITE = ("count", "nan", "pos_inf", "neg_inf", "sum", "m2")
_OF_NORMS = (*_FINITE, "reference")


def _lay_out(rows: Rows, line_of: IntArray, lines: int) -> Norms:
    """The changes that some rows tell; for each site, by its code, its line, or −1 for one that is no update."""
    line = line_of[rows["site"]]
    index = np.flatnonzero((line >= 0) & (rows["phase"] == encode_phase("train")))
    index = index[rows.counts(index)]
    steps, column = number_steps(rows["step"][index])
    cells, shape = line[index] * len(steps) + column, (lines, len(steps))
    occupied = np.bincount(cells, minlength=shape[0] * shape[1]) > 0

    def lay_out(values: npt.NDArray[Any]) -> FloatArray:
        total = np.bincount(cells, values, minlength=len(occupied))
        return np.asarray(np.where(occupied, total, np.nan).reshape(shape), np.float64)

    part = {name: rows[name][index] for name in _FINITE}
    finite = finite_count(part)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.where(finite == part["count"], part["m2"] + part["sum"] ** 2 / np.maximum(finite, 1), np.inf)
        delta, weight = np.sqrt(lay_out(squares)), np.sqrt(lay_out(rows["reference"][index]))
    return Norms(steps, delta, weight, lay_out(part["count"]))


def _describe(delta: FloatArray, weight: FloatArray) -> npt.NDArray[np.bool_]:
    """Find which changes are more than rounding."""
    return np.asarray(np.nan_to_num(delta) > TOLD * np.nan_to_num(weight))


def add_up(norms: FloatArray) -> FloatArray:
    """The norm of several parameters together, of the norms of each: from shape ``[parameters, steps]`` to ``[steps]``.

    NaN count for nothing.
    """
    with np.errstate(over="ignore"):
        return np.asarray(np.sqrt(np.nansum(norms**2, axis=0)))


# ---- updates that change nothing ----


class Stillness:
    """Updates of the parameters whose gradients were recorded, at the steps at which both were.

    An update should have changed a parameter by more than rounding where by its gradient it would have, were it to
    that as the update of the median parameter is to its own.

    Args:
        record: what is read.
        updates: the sites of the updates.
        steps: those that may be given.

    Attributes:
        gradients: names of the gradients that were recorded.
        names: of their parameters.
        has_changed: whether any parameter was changed by an update that was given.
    """

    def __init__(self, record: Record, updates: Sequence[Site], steps: IntArray) -> None:
        gradients = [str(site.value.grad) for site in updates]
        self._is_known = np.array([name in record.history for name in gradients], np.bool_)
        self.gradients = [name for name in gradients if name in record.history]
        self.names = [str(site.value) for site, is_known in zip(updates, self._is_known, strict=True) if is_known]
        self._often, self._is_still = np.zeros(len(self.names), np.int64), np.ones(len(self.names), np.bool_)
        self._moved, self._begin = self._often.copy(), self._often.copy()
        self._behind, self._with_others = self._often.copy(), self._is_still.copy()
        self._steps, self._count, self.has_changed = JoinedSteps(steps), 0, False

    @cached_property
    def steps(self) -> IntArray:
        """Steps at which both were recorded, rising."""
        return self._steps.join()

    def add(self, rows: Rows, codes: list[dict[int, int]], changes: Norms) -> None:
        """Take in the next steps.

        Args:
            rows: those of the gradients among others.
            codes: of each gradient.
            changes: of all parameters.
        """
        if not self.gradients:
            return
        norms = build_matrix(rows, codes, self.gradients, "l2", "train")
        self.has_changed = self.has_changed or bool((np.nan_to_num(changes.delta) > 0).any())
        shared, ours, theirs = np.intersect1d(changes.steps, norms.steps, True, return_indices=True)
        delta, weight = changes.delta[self._is_known][:, ours], changes.weight[self._is_known][:, ours]
        is_expected = np.isfinite(delta) & (_expect(delta, norms.values[:, theirs]) > TOLD * weight)
        self._add(delta, is_expected, self._count)
        self._steps.add(shared)
        self._count += len(shared)

    def _add(self, delta: FloatArray, is_expected: npt.NDArray[np.bool_], place: int) -> None:
        """Take in the next steps, the first of which has this place among all: ‖Δw‖₂, and where a change was due."""
        self._often += is_expected.sum(axis=1)
        self._is_still &= (~is_expected | (delta == 0)).all(axis=1)
        if not delta.shape[1]:
            return
        has_moved = delta > 0
        moves = has_moved.any(axis=1)
        end = np.where(moves, delta.shape[1] - has_moved[:, ::-1].argmax(axis=1), 0)  # behind the last move
        is_behind = is_expected & (np.arange(delta.shape[1]) >= end[:, None])
        self._moved += has_moved.sum(axis=1)
        self._begin = np.where(moves, place + end, self._begin)
        self._behind = np.where(moves, 0, self._behind) + is_behind.sum(axis=1)
        self._with_others = (moves | self._with_others) & (~is_behind | has_moved.any(axis=0)).all(axis=1)

    def find_still(self, fewest: int) -> dict[str, int]:
        """Parameters that no update has changed, each with the number of updates that should have."""
        still = self._is_still & (self._often >= fewest)
        return {self.names[k]: int(self._often[k]) for k in np.flatnonzero(still)}

    def find_stopped(self, fewest: int) -> dict[str, int]:
        """Parameters that updates had changed and then do not any more, each with the place of the first that does not.

        Others are changed until the end.
        """
        stopped = (self._moved >= fewest) & (self._behind >= fewest) & self._with_others
        return {self.names[k]: int(self._begin[k]) for k in np.flatnonzero(stopped)}


def _expect(delta: FloatArray, gradients: FloatArray) -> FloatArray:
    """Expected ‖Δw‖, were it to the gradient as that of the median parameter."""
    per_gradient = divide(np.where(delta > 0, delta, np.nan), gradients)
    known = np.isfinite(per_gradient).any(axis=0)
    usual = np.zeros(delta.shape[1])
    usual[known] = np.nanmedian(per_gradient[:, known], axis=0)
    with np.errstate(invalid="ignore"):  # what is not finite stays so
        return np.asarray(gradients * usual)
