"""Sizes of memory, as people write them."""

from __future__ import annotations

import math
import re

from retrograd.errors import SavedPolicyError

Budget = int | float | str

_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
    "tib": 1 << 40,
}  # fmt: skip
_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", re.IGNORECASE)


def read_budget(budget: Budget) -> int | float:
    """Bytes, or a share.

    Args:
        budget: bytes (``8_000_000_000``, ``"8GB"``, ``"500 MiB"``; a kB is 1000 bytes, a KiB 1024), or a share of
            what would be held: ``0.5``, ``"50%"``.

    Returns:
        Bytes as an int, or the share as a float in (0, 1].

    Raises:
        SavedPolicyError: it is neither.
    """
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    if isinstance(budget, float) and math.isfinite(budget) and 0 < budget <= 1:
        return budget
    if isinstance(budget, str) and (percent := _SHARE.fullmatch(budget)) and 0 < float(percent[1]) <= 100:
        return float(percent[1]) / 100
    match = _SIZE.fullmatch(budget) if isinstance(budget, str) else None
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is not None and unit is not None and float(match[1]) * unit >= 1:
        return round(float(match[1]) * unit)
    raise SavedPolicyError(
        f"{budget!r} is no budget.",
        repair='give bytes (8_000_000_000 or "8GB") or a share of what would be held (0.5, "50%").',
    )


def show_bytes(count: float) -> str:
    """Three digits and a unit: ``"6.92 MB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
