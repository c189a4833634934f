"""Numbers as people read them."""

from __future__ import annotations

import re

_EXPONENT = re.compile(r"(?<![\w.])(\d(?:\.\d+)?)e\+0([1-5])\b")


def write_plainly(text: str) -> str:
    """A text in which numbers up to a million have no exponent: ``170`` for ``1.7e+02``."""
    return _EXPONENT.sub(lambda found: f"{float(found[0]):,.0f}", text)


def count_more(count: int, one: str) -> str:
    """``1 more layer``, ``3 more layers``."""
    return f"{count} more {one}{'s' * (count != 1)}"
