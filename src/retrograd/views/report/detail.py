"""How finely numbers are written, so that the file stays small enough to be mailed."""

from __future__ import annotations

from retrograd.views.report.packing import MANTISSA_BITS

FEWEST_COLUMNS = 100
MANTISSAS = (MANTISSA_BITS, 13, 9)
"""Bits to round to, finest first; the last leave three significant digits."""

# Numbers a site has in a column, of which there are more where a column keeps several bands. Shares of zeros, update
# ratios and counts are not among them: they are alike for most sites and cost next to nothing.
_SINGLE_NUMBERS = 5
_BAND_NUMBERS = 10

_BYTES_BESIDE_MANTISSA = 0.35  # sign and exponent after compression, measured on noisy curves
_BASE64 = 4 / 3


def choose_detail(n_sites: int, n_steps: int, most_columns: int, max_bytes: float) -> tuple[int, int]:
    """How many columns, and how many bits of mantissa, are expected to take at most ``max_bytes`` as packed text.

    Digits are given up before columns.
    """
    columns = max(min(most_columns, n_steps), 1)
    numbers = n_sites * (_SINGLE_NUMBERS if n_steps <= most_columns else _BAND_NUMBERS)
    for bits in MANTISSAS:
        column_bytes = numbers * (bits / 8 + _BYTES_BESIDE_MANTISSA) * _BASE64
        if columns * column_bytes <= max_bytes:
            return columns, bits
    return max(FEWEST_COLUMNS, int(max_bytes / column_bytes)), MANTISSAS[-1]
