"""One site over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from retrograd.history.columns import encode_phase
from retrograd.history.kept import Kept
from retrograd.history.matrix import compute_statistic, number_steps
from retrograd.history.rows import Part, Picked, Rows
from retrograd.history.sink import PHASES

FloatArray = npt.NDArray[np.float64]
_SAME_CALL = ("step", "micro", "phase", "rank")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows of a site are meant; None means all of them.

    ``backward`` speaks of gradients alone: values belong to no pass and are always meant.
    """

    phase: str | None = "train"
    backward: int | None = 0
    micro: int | None = None
    rank: int | None = None

    def pick(self, rows: Rows, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of the rows at ``index`` that are meant, by rising step."""
        mask = np.ones(len(index), np.bool_)
        if self.phase is not None:
            mask &= rows["phase"][index] == encode_phase(self.phase)
        if self.backward is not None:
            mask &= np.isin(rows["backward"][index], (-1, self.backward))
        for name in ("micro", "rank"):
            wanted = getattr(self, name)
            if wanted is not None:
                mask &= rows[name][index] == wanted
        chosen = index[mask]
        return chosen[np.argsort(rows["step"][chosen], kind="stable")]


class Wanted(TypedDict, total=False):
    """What :meth:`Series.select` takes."""

    phase: str | None
    backward: int | None
    micro: int | None
    rank: int | None


class Statistic:
    """A statistic as an attribute of a series: float64, one number a step."""

    def __init__(self, text: str) -> None:
        self.__doc__ = text

    def __set_name__(self, owner: type[Series], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, series: None, owner: type[Series]) -> Statistic: ...
    @overload
    def __get__(self, series: Series, owner: type[Series]) -> FloatArray: ...
    def __get__(self, series: Series | None, owner: type[Series]) -> FloatArray | Statistic:
        return self if series is None else series.statistic(self._name)


class Series:
    """One site's statistics over steps, as they were when it was asked for.

    By default it speaks of the phase ``train`` and the first backward pass, with micro-batches and ranks
    merged into one number a step: what several ranks hold the same of counts once. :meth:`select` says otherwise.

    Attributes:
        site: its name.
    """

    count = Statistic("Elements.")
    nan = Statistic("Elements that are NaN.")
    pos_inf = Statistic("Elements that are +∞.")
    neg_inf = Statistic("Elements that are −∞.")
    nonfinite = Statistic("Elements that are NaN or infinite.")
    zeros = Statistic("Elements that are zero.")
    zero_share = Statistic("Share of elements that are zero.")
    mean = Statistic("Mean of the finite elements.")
    std = Statistic("Standard deviation of the finite elements, divided by n.")
    rms = Statistic("Root of the mean square of the finite elements.")
    l1 = Statistic("Σ |x| over the finite elements.")
    l2 = Statistic("√Σ x² over the finite elements.")
    min = Statistic("Smallest finite element.")
    max = Statistic("Largest finite element.")
    abs_max = Statistic("Largest magnitude of a finite element.")
    update_ratio = Statistic("‖Δw‖₂ / ‖w‖₂ of a parameter's update; NaN for anything else.")

    def __init__(
        self,
        rows: Rows,
        site: str,
        index: npt.NDArray[np.int64],
        choice: Choice,
        list_tensors: Callable[[], Sequence[Kept]],
        find_input: Callable[[Series], Series],
    ) -> None:
        self.site = site
        self._rows = rows
        self._site_index = index
        self._choice = choice
        self._list_tensors = list_tensors
        self._find_input = find_input

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        if not len(self):
            return f"Series({self.site!r}: no steps of {self._choice})"
        last = ", ".join(f"{value:.3g}" for value in self.rms[-3:])
        return f"Series({self.site!r}: {len(self):,} steps {self.steps[0]}…{self.steps[-1]}, rms … {last})"

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Steps at which there is something, rising: int64, shape ``[n]``."""
        return self._numbered[0]

    @cached_property
    def tensors(self) -> Sequence[Kept]:
        """What was kept of it whole or in part, oldest first, of all phases; each is loaded when it is asked for."""
        return self._list_tensors()

    @property
    def exponents(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The steps, and for each the exponent histogram: int64, shape ``[n, 255]``.

        Bin ``e + 127`` counts the elements with 2^e ≤ |x| < 2^(e+1).
        """
        steps, groups = self._numbered
        return steps, Picked(self._rows, self._index).exponents(groups, len(steps))

    @property
    def rows(self) -> dict[str, npt.NDArray[Any]]:
        """The rows themselves of all ranks, unmerged, as columns of equal length; ``phase`` in words."""
        picked = Picked(self._rows, self._choice.pick(self._rows, self._site_index))
        columns = {name: picked[name] for name in picked if name not in ("site", "first_bin", "bin_count")}
        columns["phase"] = np.array(PHASES)[columns["phase"]]
        return columns

    @property
    def input(self) -> Series:
        """For a gradient or an update: the series of the value, at the very calls that these are of.

        Raises:
            NoSuchSiteError: when the value was not recorded.
        """
        return self._find_input(self)

    def statistic(self, name: str) -> FloatArray:
        """A statistic by name, a user's own among them: one number a step.

        Raises:
            StatisticError: for a name that is none.
        """
        return compute_statistic(self._merged, name, self._rows.custom)

    def select(self, **wanted: Unpack[Wanted]) -> Series:
        """Another choice of this site's rows.

        Args:
            wanted: ``phase``, ``backward``, ``micro``, ``rank``; None stands for all of them merged.

        Raises:
            ValueError: for a phase that is none.
        """
        choice = replace(self._choice, **wanted)
        if choice.phase is not None:
            encode_phase(choice.phase)  # raises at once for a word that is none
        return Series(self._rows, self.site, self._site_index, choice, self._list_tensors, self._find_input)

    def paired_with(self, other: Series) -> Series:
        """This series at the calls that another one is of: same step, micro-batch, phase and rank."""
        mine, theirs = _stack_calls(self._rows, self._site_index), _stack_calls(other._rows, other._index)
        index = self._site_index[np.isin(mine, theirs)]
        return Series(self._rows, self.site, index, other._choice, self._list_tensors, self._find_input)

    @cached_property
    def _index(self) -> npt.NDArray[np.int64]:
        index = self._choice.pick(self._rows, self._site_index)
        return np.asarray(self._rows.count_once(index)) if self._choice.rank is None else index

    @cached_property
    def _numbered(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return number_steps(self._rows["step"][self._index])

    @cached_property
    def _merged(self) -> Part:
        steps, groups = self._numbered
        picked = Picked(self._rows, self._index)
        return picked if len(steps) == len(groups) else picked.merge(groups, len(steps))


def _stack_calls(rows: Rows, index: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    keys = np.stack([rows[name][index].astype(np.int64) for name in _SAME_CALL], axis=1)
    return np.ascontiguousarray(keys).view([(name, np.int64) for name in _SAME_CALL]).reshape(-1)
