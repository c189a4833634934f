"""One line a place: how its value and its gradient stand at the end, and how they came there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

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
    """A place in numbers; NaN where there is none.

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
    value: float
    gradient: float
    curve: FloatArray
    zeros: float
    nonfinite: int
    update: float


def summarize(
    history: History, sites: Sequence[str] | None = None, statistic: str = "rms", phase: Phase = "train"
) -> list[Summary]:
    """Summaries of all places that have any of the sites: activations in call order, then parameters."""
    sites = history.sites if sites is None else list(sites)
    if not sites:
        return []
    places = sorted(group_places(sites), key=lambda place: place.kind == "parameter")
    numbers = {site: number for number, site in enumerate(sites)}
    names = (statistic, "zero_share", "nonfinite", "update_ratio")
    curves, zeros, nonfinite, ratios = (history.matrix(name, sites, phase=phase).values for name in names)

    def pick(place: Place, *quantities: Quantity) -> int | None:
        return next((numbers[place.sites[quantity]] for quantity in quantities if quantity in place.sites), None)

    return [
        Summary(
            place,
            value=_last(curves, pick(place, "value")),
            gradient=_last(curves, pick(place, "grad")),
            curve=curves[pick(place, "grad", "value", "update")],
            zeros=_last(zeros, pick(place, "value", "grad")),
            nonfinite=int(sum(np.nansum(nonfinite[numbers[site]]) for site in place.sites.values())),
            update=_last(ratios, pick(place, "update")),
        )
        for place in places
    ]


def sort_summaries(summaries: Iterable[Summary], order: Order) -> list[Summary]:
    """By name, or by falling numbers with unknown ones last; ``calls`` leaves the order as it is.

    Raises:
        PatternError: for an order that is none.
    """
    if order not in ORDERS:
        raise PatternError(f"There is no order {order!r}.", repair=f"one of {', '.join(ORDERS)}.")
    if order == "calls":
        return list(summaries)
    if order == "name":
        return sorted(summaries, key=lambda summary: summary.place.name)
    return sorted(summaries, key=lambda summary: _falling(float(getattr(summary, order))))


def _falling(number: float) -> tuple[bool, float]:
    return (bool(np.isnan(number)), -number)


def _last(values: FloatArray, row: int | None) -> float:
    """Last number of a row that is not NaN."""
    known = values[row][~np.isnan(values[row])] if row is not None else values[:0].ravel()
    return float(known[-1]) if len(known) else float("nan")
