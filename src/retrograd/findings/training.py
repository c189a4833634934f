"""The losses, rates and updates of a run, and the updates that changed nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from retrograd.amounts import count_of
from retrograd.findings.record import CannotTell, Record
from retrograd.history.arrays import read_numbers
from retrograd.history.cells import locate
from retrograd.history.facts import OptimizerMade
from retrograd.history.rows import Rows, encode_phase
from retrograd.history.steps import number_steps
from retrograd.sites.site import Site
from retrograd.statistics.row import finite_count

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

T = TypeVar("T", bound=np.generic)

MOVED = 0.9
"""A loss that is above this share of what it was at first has not fallen."""

ROSE = 3.0
"""A loss that is so many times what it was has been thrown off, or has diverged."""

_ADAPTIVE = ("ada", "rmsprop", "rprop", "lion", "lamb", "muon")


@dataclass(frozen=True)
class UpdateNorms:
    """Changes of parameters by optimizers: arrays of shape ``[parameters, steps]``.

    Attributes:
        sites: of the updates.
        steps: rising.
        delta: ‖Δw‖₂; NaN where a parameter was not updated, infinite where the update is not finite.
        weight: ‖w‖₂ before it.
        elements: of each parameter at the first step, shape ``[parameters]``; NaN where it was not updated then.
    """

    sites: tuple[Site, ...]
    steps: IntArray
    delta: FloatArray
    weight: FloatArray
    elements: FloatArray

    @cached_property
    def ratio(self) -> FloatArray:
        """‖Δw‖ / ‖w‖ over all parameters of a step, shape ``[steps]``; NaN where all weights are zero."""
        with np.errstate(over="ignore"):
            changed = np.sqrt(np.nansum(self.delta**2, axis=0))
            weights = np.sqrt(np.nansum(self.weight**2, axis=0))
        return divide(changed, weights)

    @cached_property
    def finite_ratio(self) -> FloatArray:
        """``ratio``, 0 where it is not finite: a NaN does not come of too large a step."""
        return np.where(np.isfinite(self.ratio), self.ratio, 0.0)


class Training:
    """Losses, rates and updates of a record.

    Args:
        record: what it reads.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self.loss = record.loss

    # ---- losses ----

    def need_loss(self, least: int = 1) -> None:
        """Make sure that there is a loss to speak of.

        Raises:
            CannotTell: there is none, too few, or models that train against each other.
        """
        if len(self.loss.values) < least:
            raise CannotTell(
                f"{count_of(len(self.loss.values), 'loss was', 'losses were')} recorded, and it takes {least}"
            )
        if self.is_contest:
            raise CannotTell("several models are trained by several optimizers, and no loss need fall")

    @cached_property
    def lost(self) -> int | None:
        """The first step at which the loss is not finite; None where there is none."""
        steps = self.loss.steps[~np.isfinite(self.loss.values)]
        return int(steps[0]) if len(steps) else None

    @cached_property
    def initial(self) -> float:
        """The loss before training: the first one that is finite; NaN where there is none."""
        finite = self.loss.values[np.isfinite(self.loss.values)]
        return float(finite[0]) if len(finite) else np.nan

    @cached_property
    def lowest(self) -> float:
        """The lowest loss that is finite; NaN where there is none."""
        finite = self.loss.values[np.isfinite(self.loss.values)]
        return float(finite.min()) if len(finite) else np.nan

    @cached_property
    def early(self) -> float:
        """The median of the first tenth of the losses, at least three."""
        head = self.loss.values[: max(3, len(self.loss.values) // 10)]
        return _median(head)

    @cached_property
    def late(self) -> float:
        """The median of the last fifth of the losses, at least three; NaN where one is not finite."""
        return _median(self.loss.values[-max(3, len(self.loss.values) // 5) :])

    @property
    def stride(self) -> int:
        """Steps from one recorded loss to the next."""
        return int(np.median(np.diff(self.loss.steps))) if len(self.loss.steps) > 1 else 1

    @cached_property
    def noise(self) -> float:
        """Robust standard deviation of a loss from its neighbours; NaN for fewer than three."""
        steps = np.diff(self.loss.values[np.isfinite(self.loss.values)])
        return float(1.4826 * np.median(np.abs(steps)) / np.sqrt(2)) if len(steps) > 1 else np.nan

    @property
    def fell(self) -> bool:
        """True if the loss ended clearly lower than it began: by a tenth, and by more than its noise."""
        start = min(self.initial, self.early)
        return bool(self.late < start - max((1 - MOVED) * abs(start), self.noise if self.noise > 0 else 0.0))

    @cached_property
    def is_contest(self) -> bool:
        """True if several models are updated in turn, as in a GAN, so that no loss need fall."""
        roots = {site.path.partition(".")[0] for site in self._record.of_kind("parameter", "update")}
        if len(roots & self._record.root_names) < 2:
            return False
        updates, different = 0, np.empty(0, np.int64)
        for piece in self._record.history.all_events.pieces(["step"], ["update"]):
            updates += piece.num_rows
            different, _ = number_steps(np.concatenate((different, read_numbers(piece["step"]))))
        return updates > 1.5 * max(len(different), 1)

    # ---- rates ----

    @cached_property
    def rates(self) -> dict[int, float]:
        """The largest learning rate of each step, as it was told; empty where it was not."""
        told: dict[int, float] = {}
        for call in self._record.calls:
            if call.name == "step":
                rates = [float(each) for each in as_list(call.details.get("lr")) if is_number(each)]
                told[call.step] = max([told.get(call.step, 0.0), *rates])
        return told

    @property
    def rate(self) -> float | None:
        """The largest learning rate of all groups at the first update; None where it was not told."""
        made = [number(group.get("lr")) for _, group in self.groups()]
        listed = [self.rates[min(self.rates)]] if self.rates else [each for each in made if each is not None]
        return max(listed) if listed else None

    def groups(self) -> list[tuple[str, dict[str, Any]]]:
        """The groups of all optimizers as they were at first: name of the optimizer, hyper-parameters."""
        first = {made.name: made for made in reversed(self._record.of(OptimizerMade))}
        return [(name, dict(group)) for name, made in first.items() for group in made.groups]

    @property
    def optimizer(self) -> str:
        """Class of the optimizer that updated first: ``Adam``; empty where none did."""
        updates = self._record.history.all_events.pieces(["name"], ["update"])
        return next((str(piece["name"][0]) for piece in updates if piece.num_rows), "").partition("#")[0]

    # ---- updates ----

    @cached_property
    def updates(self) -> UpdateNorms:
        """Changes of parameters by optimizers in training.

        Raises:
            CannotTell: no update was recorded.
        """
        sites = self._record.of_kind("parameter", "update")
        if not sites:
            raise CannotTell("no update of a parameter was recorded")
        return _lay_out_updates(self._record, sites)


def _lay_out_updates(record: Record, sites: list[Site]) -> UpdateNorms:
    names = record.history.site_names
    code_of = {name: code for code, name in enumerate(names)}
    codes = [code_of[str(site)] for site in sites]
    line_of = np.full(len(names) + 1, -1)
    line_of[codes] = np.arange(len(sites))
    elements = np.full(len(sites), np.nan)
    steps, delta, weight = list[IntArray](), list[FloatArray](), list[FloatArray]()
    for rows in record.history.rows.merged("train", codes, _OF_NORMS):
        found, changes, weights, counts = _lay_out_some(rows, line_of, len(sites))
        if counts.shape[1] and not any(map(len, steps)):
            elements = counts[:, 0].copy()
        steps.append(found)
        delta.append(changes)
        weight.append(weights)
    return UpdateNorms(tuple(sites), _join(steps), _join(delta), _join(weight), elements)


def _join(pieces: list[npt.NDArray[T]]) -> npt.NDArray[T]:
    """Arrays one behind the other, of steps or of parameters and steps; the list is emptied: they may be long."""
    joined = np.concatenate(pieces, axis=-1)
    pieces.clear()
    return joined


_FINITE = ("count", "nan", "pos_inf", "neg_inf", "sum", "m2")
_OF_NORMS = (*_FINITE, "reference")


def _lay_out_some(rows: Rows, line_of: IntArray, lines: int) -> tuple[IntArray, FloatArray, FloatArray, FloatArray]:
    """Steps, ‖Δw‖₂, ‖w‖₂ and elements of the updates among some rows."""
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
    return steps, delta, weight, lay_out(part["count"])


def is_adaptive(optimizer: str) -> bool:
    """Tell by its class whether an optimizer makes updates whose size does not depend on that of the gradients."""
    return any(name in optimizer.lower() for name in _ADAPTIVE)


def divide(numerator: Any, denominator: Any) -> FloatArray:
    """Element by element; NaN where the denominator is 0."""
    bottom = np.asarray(denominator, np.float64)
    out = np.full(np.broadcast(numerator, bottom).shape, np.nan)
    with np.errstate(over="ignore", invalid="ignore"):
        np.divide(numerator, bottom, out=out, where=bottom != 0)
    return out


def as_list(value: Any) -> list[Any]:
    """A value, or several, as a list; none for None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def is_number(value: Any) -> bool:
    """Tell whether it is a plain number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any) -> float | None:
    """A plain number; None for anything else."""
    return float(value) if is_number(value) else None


def median(values: Any) -> float:
    """The median of what is finite; NaN where nothing is."""
    known = np.asarray(values, np.float64)
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else np.nan


def _median(values: FloatArray) -> float:
    return float(np.median(values)) if len(values) and np.isfinite(values).all() else np.nan


# ---- updates that change nothing ----

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
        self.names = [str(site.value) for site, is_known in zip(updates.sites, known, strict=True) if is_known]
        shared, expected = [np.empty(0, np.int64)], [np.empty((len(self.names), 0), np.bool_)]
        for [norms] in record.history.matrices(["l2"], [each for each in gradients if each in record.history]):
            place = locate(updates.steps, norms.steps)
            of = np.flatnonzero(updates.steps[place] == norms.steps)
            at = place[of]
            delta, weight = updates.delta[known][:, at], updates.weight[known][:, at]
            shared.append(at)
            expected.append(np.isfinite(delta) & (_expect(delta, norms.values[:, of]) > TOLD * weight))
        at = _join(shared)
        is_whole = len(at) == len(updates.steps)
        self.steps = updates.steps if is_whole else updates.steps[at]
        self.delta = updates.delta if is_whole and known.all() else updates.delta[known][:, at]
        self.is_expected: BoolArray = _join(expected)

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
    """Expected ‖Δw‖, were it to the gradient as that of the median parameter."""
    per_gradient = divide(np.where(delta > 0, delta, np.nan), gradients)
    known = np.isfinite(per_gradient).any(axis=0)
    usual = np.zeros(delta.shape[1])
    usual[known] = np.nanmedian(per_gradient[:, known], axis=0)
    with np.errstate(invalid="ignore"):  # what is not finite stays so
        return np.asarray(gradients * usual)
