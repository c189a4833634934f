"""Which statistics the page carries, and what a column of several steps keeps of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Band = Literal["low", "mean", "high"]

ALL_BANDS: tuple[Band, ...] = ("low", "mean", "high")


@dataclass(frozen=True, slots=True)
class Measure:
    """A statistic of the page.

    Attributes:
        name: the history's name for it.
        label: its words on the page.
        bands: what a column of several steps keeps of it.
        signed: whether it is drawn around zero.
        share: whether it lies between 0 and 1.
        scale: the scale on which it is drawn at first.
        is_custom: whether it is the user's own, of which nothing is known.
    """

    name: str
    label: str
    bands: tuple[Band, ...] = ALL_BANDS
    signed: bool = False
    share: bool = False
    scale: Literal["log", "linear"] = "log"
    is_custom: bool = False


MEASURES = (
    Measure("rms", "rms"),
    Measure("mean", "mean", signed=True),
    Measure("std", "standard deviation", ("mean", "high")),
    Measure("min", "smallest element", ("low",), signed=True),
    Measure("max", "largest element", ("high",), signed=True),
    Measure("zero_share", "zeros share", share=True, scale="linear"),
    Measure("update_ratio", "update ratio"),
    Measure("nonfinite", "non-finite elements", ("high",)),
)
"""The largest magnitude is missing because the page has it from ``min`` and ``max``."""


def list_measures(manifest: Mapping[str, Any]) -> list[Measure]:
    """All statistics of the page: ours, then the user's own."""
    return [*MEASURES, *(Measure(str(name), str(name), is_custom=True) for name in manifest.get("statistics") or ())]
