"""Which statistics the page carries, and how finely, so that the file stays small enough to be mailed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from retrograd.views.report.packing import MANTISSA_BITS

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
    """

    name: str
    label: str
    bands: tuple[Band, ...] = ALL_BANDS
    signed: bool = False
    share: bool = False


MEASURES = (
    Measure("rms", "rms"),
    Measure("mean", "mean", signed=True),
    Measure("std", "standard deviation", ("mean", "high")),
    Measure("min", "smallest element", ("low",), signed=True),
    Measure("max", "largest element", ("high",), signed=True),
    Measure("zero_share", "zeros share", share=True),
    Measure("update_ratio", "update ratio"),
    Measure("nonfinite", "non-finite elements", ("high",)),
)
"""The largest magnitude is missing because the page has it from ``min`` and ``max``."""


def list_measures(manifest: Mapping[str, Any]) -> list[Measure]:
    """All statistics of the page: ours, then the user's own."""
    return [*MEASURES, *(Measure(str(name), str(name)) for name in manifest.get("statistics") or ())]


@dataclass(frozen=True, slots=True)
class Detail:
    """How finely numbers are written: at most so many columns, so many bits of mantissa."""

    columns: int
    mantissa_bits: int


_FEWEST_COLUMNS = 100
_COARSEST_BITS = 9  # three significant digits
_BANDS_A_SITE = 10  # shares of zeros, update ratios and counts are alike for most sites and cost next to nothing
_BYTES_BESIDE_MANTISSA = 0.35  # sign and exponent after compression, measured on noisy curves
_BASE64 = 4 / 3


def choose_detail(n_sites: int, n_steps: int, most_columns: int, max_bytes: float) -> Detail:
    """The finest detail at which the page is expected to stay within ``max_bytes``.

    Digits are given up before columns.
    """
    columns = max(min(most_columns, n_steps), 1)
    bands = 5 if n_steps <= most_columns else _BANDS_A_SITE
    for bits in (MANTISSA_BITS, 13, _COARSEST_BITS):
        column_bytes = n_sites * bands * (bits / 8 + _BYTES_BESIDE_MANTISSA) * _BASE64
        if columns * column_bytes <= max_bytes:
            return Detail(columns, bits)
    return Detail(max(_FEWEST_COLUMNS, int(max_bytes / column_bytes)), _COARSEST_BITS)
