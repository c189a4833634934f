"""Sizes of memory, as people write them."""

from __future__ import annotations

import math
import re

from retrograd.amounts import parse_bytes
from retrograd.errors import SavedPolicyError

Budget = int | float | str

_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")


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
    is_size = isinstance(budget, str) and not budget[-1:].isdigit()  # a number alone may be meant as a share
    if is_size and (found := parse_bytes(str(budget))):
        return found
    raise SavedPolicyError(
        f"{budget!r} is not a valid budget.",
        repair='give bytes (8_000_000_000 or "8GB") or a share of what would be held (0.5, "50%").',
    )
