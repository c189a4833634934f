"""Numbers as text inside a page: float32, byte planes, gzip, base64.

The bytes of all numbers are sorted by significance (all first bytes, all second bytes …), because signs and
exponents of neighbours are alike and compress well. Numbers may be rounded to fewer bits of mantissa first;
range, NaN and infinities stay those of float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.views.page.frame import pack_bytes

MANTISSA_BITS = 23
"""Bits of a float32's mantissa: at this number nothing is rounded away."""


def pack_floats(values: npt.NDArray[Any], mantissa_bits: int = MANTISSA_BITS) -> str:
    """Text of an array of any shape, in C order; numbers beyond float32 become infinite or zero."""
    with np.errstate(over="ignore", under="ignore"):
        single = np.ascontiguousarray(values, dtype="<f4").ravel()
    planes = round_mantissa(single, mantissa_bits).view(np.uint8).reshape(-1, 4).T
    return pack_bytes(np.ascontiguousarray(planes).tobytes())


def round_mantissa(values: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    """Round to the nearest float32 whose mantissa ends in ``23 − bits`` zeros."""
    dropped = MANTISSA_BITS - bits
    if dropped <= 0:
        return values
    pattern = values.view(np.uint32)
    rounded = (pattern + np.uint32(1 << (dropped - 1))) & np.uint32((0xFFFFFFFF << dropped) & 0xFFFFFFFF)
    return np.where(np.isfinite(values), rounded, pattern).view(np.float32)


def significant_digits(mantissa_bits: int) -> int:
    """Decimal digits that survive rounding to so many bits."""
    return int((mantissa_bits + 1) * np.log10(2.0))
