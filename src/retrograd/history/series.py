"""One site over time."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from retrograd.errors import NoSuchSiteError
from retrograd.history.columns import encode_phase
from retrograd.history.kept import Kept, KeptTensors
from retrograd.history.matrix import compute_statistic, number_steps
from retrograd.history.rows import Part, Picked, Rows
from retrograd.history.sink import PHASES

FloatArray = npt.NDArray[np.float64]
_SAME_CALL = ("step", "micro", "phase", "rank")


class Relatives(Protocol):
    """Finds what belongs to a series in the record that it is of."""

    def list_tensors(self, series: Series) -> Sequence[Kept]:
        """What was kept of its calls, oldest first."""

    def explain_none_kept(self, series: Series) -> Exception:
        """What to raise when a tensor is asked for, and none was kept."""

    def find_value(self, series: Series) -> Series:
        """The value that it is the gradient or the update of."""

    def find_inputs(self, series: Series) -> dict[str, Series]:
        """What the module was called with, by the names of arguments."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows of a site are meant; None means all of them.

    ``backward`` speaks of gradients alone: values belong to no pass and are always meant. ``call`` is the number of
    the module's call.
    """

    phase: str | None = "train"
    backward: int | None = 0
    micro: int | None = None
    rank: int | None = None
    call: int | None = None

    def pick(self, rows: Rows, index: npt.NDArray[np.int64], calls: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of the rows at ``index``, of these calls, that are meant: their places, by rising step."""
        mask = np.ones(len(index), np.bool_) if self.call is None else calls == self.call
        if self.phase is not None:
            mask &= rows["phase"][index] == encode_phase(self.phase)
        if self.backward is not None:
            mask &= np.isin(rows["backward"][index], (-1, self.backward))
        for name in ("micro", "rank"):
            wanted = getattr(self, name)
            if wanted is not None:
                mask &= rows[name][index] == wanted
        chosen = np.flatnonzero(mask)
        return chosen[np.argsort(rows["step"][index[chosen]], kind="stable")]


class Wanted(TypedDict, total=False):
    """What :meth:`Series.select` takes."""

    phase: str | None
    backward: int | None
    micro: int | None
    rank: int | None
    call: int | None


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

    By default it speaks of the phase ``train`` and the first backward pass, with micro-batches, ranks, and calls of
    the module merged into one number a step; what several ranks hold the same of counts once. :meth:`select` says
    otherwise. The name of one call, ``fc#2:output``, gives that call alone.

    Args:
        rows: all rows.
        site: its name, as it was asked for.
        calls: which rows are of each call.
        relatives: what belongs to it.
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
        calls: Mapping[int, npt.NDArray[np.int64]],
        relatives: Relatives,
    ) -> None:
        self.site = site
        self._rows = rows
        self._relatives = relatives
        self._site_index = np.concatenate(list(calls.values()))
        self._site_calls = np.repeat(list(calls), [len(index) for index in calls.values()])
        self._choice = Choice()
        self._leader: Series | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        merged = f"{len(self.calls)} calls merged, " if len(self.calls) > 1 else ""
        if not len(self):
            return f"Series({self.site!r}: {merged}no steps of {self._choice})"
        last = ", ".join(f"{value:.3g}" for value in self.rms[-3:])
        return f"Series({self.site!r}: {merged}{len(self):,} steps {self.steps[0]}…{self.steps[-1]}, rms … {last})"

    @property
    def calls(self) -> list[int]:
        """Numbers of the module's calls that are merged here, from 1."""
        return [int(call) for call in np.unique(self._site_calls[self._chosen])]

    def means(self, call: int) -> bool:
        """Whether it was asked for what is of this call."""
        return self._choice.call in (None, call)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Steps at which there is something, rising: int64, shape ``[n]``."""
        return self._numbered[0]

    @cached_property
    def tensors(self) -> Sequence[Kept]:
        """What was kept of it whole or in part, oldest first, of all phases; each is loaded when it is asked for.

        Those of :attr:`value` and :attr:`input` are one for each tensor of the gradient, in the same order.

        Raises:
            NoSuchSiteError: when what belongs to a gradient was not kept.
            NothingKeptError: when one is asked for and there is none.
        """
        kept = self._relatives.list_tensors(self)
        matched = kept if self._leader is None else match_tensors(self._leader, self.site, kept)
        return KeptTensors(matched, lambda: self._relatives.explain_none_kept(self))

    @property
    def exponents(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The steps, and for each the exponent histogram: int64, shape ``[n, 255]``.

        Bin ``e + 127`` counts the elements with 2^e ≤ |x| < 2^(e+1).
        """
        steps, groups = self._numbered
        return steps, Picked(self._rows, self._index).exponents(groups, len(steps))

    @property
    def rows(self) -> dict[str, npt.NDArray[Any]]:
        """The rows themselves, of all ranks, as columns of equal length; ``phase`` in words, ``call`` by number."""
        chosen = self._choice.pick(self._rows, self._site_index, self._site_calls)
        picked = Picked(self._rows, self._site_index[chosen])
        columns = {name: picked[name] for name in picked if name not in ("site", "first_bin", "bin_count")}
        columns["phase"] = np.array(PHASES)[columns["phase"]]
        columns["call"] = self._site_calls[chosen]
        return columns

    @property
    def value(self) -> Series:
        """The value that this is the gradient or the update of, at the very calls that these are of.

        Raises:
            NoSuchSiteError: when the value was not recorded.
        """
        return self._relatives.find_value(self)

    @property
    def inputs(self) -> dict[str, Series]:
        """What the module was called with at the very calls that these are of, by the names of its arguments.

        A tensor in a nested argument has the name of the argument and its keys: ``"states.0"``. There is what was
        recorded of them.

        Raises:
            NoSuchSiteError: when nothing of them was recorded, or where there is no such thing: of a parameter, whose
                gradient comes from all calls, and of a tensor watched by hand.
        """
        return self._relatives.find_inputs(self)

    @property
    def input(self) -> Series:
        """The only one of :attr:`inputs`: of a linear layer, dW is the sum of ``gradient.T @ input`` over its calls.

        Raises:
            NoSuchSiteError: when several were recorded, or none.
        """
        inputs = self.inputs
        if len(inputs) > 1:
            names = ", ".join(f"history[{self.site!r}].inputs[{name!r}]" for name in inputs)
            raise NoSuchSiteError(f"{self.site!r} belongs to {len(inputs)} inputs.", repair=f"take one of {names}.")
        return next(iter(inputs.values()))

    def statistic(self, name: str) -> FloatArray:
        """A statistic by name, a user's own among them: one number a step.

        Raises:
            StatisticError: for a name that is none.
        """
        return compute_statistic(self._merged, name, self._rows.custom)

    def select(self, **wanted: Unpack[Wanted]) -> Series:
        """Another choice of this site's rows.

        Args:
            wanted: ``phase``, ``backward``, ``micro``, ``rank``, ``call``; None stands for all of them merged.

        Raises:
            ValueError: for a phase that is none.
        """
        choice = replace(self._choice, **wanted)
        if choice.phase is not None:
            encode_phase(choice.phase)  # raises at once for a word that is none
        selected = self._with(choice)
        selected._leader = self._leader and self._leader.select(**wanted)
        return selected

    def paired_with(self, other: Series) -> Series:
        """This series at the calls that another one is of: same step, micro-batch, phase, rank and call."""
        mine = _stack_calls(self._rows, self._site_index, self._site_calls)
        theirs = _stack_calls(other._rows, other._index, other._site_calls[other._chosen])
        paired = self._with(other._choice)
        paired._leader = other
        is_theirs = np.isin(mine, theirs)
        paired._site_index, paired._site_calls = self._site_index[is_theirs], self._site_calls[is_theirs]
        return paired

    def _with(self, choice: Choice) -> Series:
        other = copy.copy(self)
        for name in ("tensors", "_chosen", "_index", "_numbered", "_merged"):  # what is cached is of this choice
            vars(other).pop(name, None)
        other._choice = choice
        return other

    @cached_property
    def _chosen(self) -> npt.NDArray[np.int64]:
        chosen = self._choice.pick(self._rows, self._site_index, self._site_calls)
        return chosen if self._choice.rank is not None else chosen[self._rows.counts(self._site_index[chosen])]

    @cached_property
    def _index(self) -> npt.NDArray[np.int64]:
        return self._site_index[self._chosen]

    @cached_property
    def _numbered(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return number_steps(self._rows["step"][self._index])

    @cached_property
    def _merged(self) -> Part:
        steps, groups = self._numbered
        picked = Picked(self._rows, self._index)
        return picked if len(steps) == len(groups) else picked.merge(groups, len(steps))


def match_tensors(leader: Series, site: str, kept: Sequence[Kept]) -> list[Kept]:
    """Of what was kept, what belongs to each tensor of a gradient.

    Raises:
        NoSuchSiteError: when one of them was not kept.
    """
    by_call = {_call_of(each): each for each in kept}
    found = []
    for each in leader.tensors:
        if _call_of(each) not in by_call:
            raise NoSuchSiteError(
                f"Of {site!r} no tensor was kept that belongs to {each.site!r} at step {each.step}.",
                repair=f"keep both: rg.record(model, tensors=[{leader.site!r}, {site!r}]).",
                reason="what does not fit into the budget of tensors is dropped, and said in the events.",
            )
        found.append(by_call[_call_of(each)])
    return found


def _call_of(kept: Kept) -> tuple[int, int, str, int, int]:
    return kept.step, kept.micro, kept.phase, kept.rank, kept.call


def _stack_calls(rows: Rows, index: npt.NDArray[np.int64], calls: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    keys = np.stack([*(rows[name][index].astype(np.int64) for name in _SAME_CALL), calls.astype(np.int64)], axis=1)
    kind = [(name, np.int64) for name in (*_SAME_CALL, "call")]
    return np.ascontiguousarray(keys).view(kind).reshape(-1)
