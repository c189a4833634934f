"""One line a place: how its value and its gradient stand at the end, and how they came there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from retrograd.errors import PatternError
from retrograd.history.history import History
from retrograd.history.sink import Phase
from retrograd.sites.site import Quantity
from retrograd.views.downsample import FloatArray
from retrograd.views.places import Place, group_places

Order = Literal["calls", "name", "value", "gradient", "zeros", "nonfinite", "update"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, slots=True)
class Summary:
    """A place in numbers: None where there is none, and NaN where no element was finite at the last step.

    Attributes:
        place: which.
        value: last value of the statistic, of the place's value.
        gradient: the same, of its gradient.
        curve: the statistic over all steps, shape (n,): of the gradient where there is one, else of the value.
        zeros: share of zeros at the last step, of the value where there is one, else of the gradient.
        nonfinite: NaN and infinite elements over all steps, of all sites of the place.
        update: norm of the last update against that of the weight.
    """

    place: Place
    value: float | None
    gradient: float | None
    curve: FloatArray
    zeros: float | None
    nonfinite: int
    update: float | None


def summarize(
    history: History, sites: Sequence[str] | None = None, statistic: str = "rms", phase: Phase = "train"
) -> list[Summary]:
    """Summaries of all places that have any of the sites: activations in call order, then parameters."""
    sites = history.sites if sites is None else list(sites)
    if not sites:
        return []
    places = sorted(group_places(sites), key=lambda place: place.kind == "parameter")
    numbers = {site: number for number, site in enumerate(sites)}
    names = (statistic, "zero_share", "nonfinite", "update_ratio", "count")
    curves, zeros, nonfinite, ratios, count = (history.matrix(name, sites, phase=phase).values for name in names)
    is_lost = (nonfinite == count) & (count > 0)

    def pick(place: Place, *quantities: Quantity) -> int | None:
        return next((numbers[place.sites[quantity]] for quantity in quantities if quantity in place.sites), None)

    return [
        Summary(
            place,
            value=_last(curves, pick(place, "value"), is_lost),
            gradient=_last(curves, pick(place, "grad"), is_lost),
            curve=curves[pick(place, "grad", "value", "update")],
            zeros=_last(zeros, pick(place, "value", "grad"), is_lost),
            nonfinite=int(sum(np.nansum(nonfinite[numbers[site]]) for site in place.sites.values())),
            update=_last(ratios, pick(place, "update"), is_lost),
        )
        for place in places
    ]


def sort_summaries(summaries: Iterable[Summary], order: Order) -> list[Summary]:
    """By name, or by falling numbers, NaN first and unknown ones last; ``calls`` leaves the order as it is.

    Raises:
        PatternError: for an order that is none.
    """
    if order not in ORDERS:
        raise PatternError(f"There is no order {order!r}.", repair=f"one of {', '.join(ORDERS)}.")
    if order == "calls":
        return list(summaries)
    if order == "name":
        return sorted(summaries, key=lambda summary: summary.place.name)
    return sorted(summaries, key=lambda summary: _falling(getattr(summary, order)))


def _falling(number: float | None) -> tuple[bool, float]:
    return (number is None, -np.inf if number is None or np.isnan(number) else -number)


def _last(values: FloatArray, row: int | None, is_lost: npt.NDArray[np.bool_]) -> float | None:
    """Last number of a row, or NaN if that is of elements none of which was finite."""
    if row is None:
        return None
    numbers = np.where(is_lost[row], np.nan, values[row])
    known = np.flatnonzero(~np.isnan(values[row]) | is_lost[row])
    return float(numbers[known[-1]]) if len(known) else None
