"""Bytes, counts, durations and lists of names, as people read and write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)
_UNITS = ("B", "kB", "MB", "GB", "TB")


def parse_bytes(text: str) -> int | None:
    """Bytes from ``"500"``, ``"500MB"`` (powers of 1000) or ``"2 GiB"`` (powers of 1024); None for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    power = " kmgt".index((match[2] or " ").lower())
    return round(float(match[1]) * (1024.0 if match[3] else 1000.0) ** power)


def show_bytes(count: float, *, signed: bool = False) -> str:
    """Bytes to three digits, in units of thousands: ``12 B``, ``6.92 MB``.

    Args:
        count: bytes.
        signed: also say ``+`` of a gain.
    """
    size, unit = float(abs(count)), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:  # what is rounded up to 1000 belongs to the next unit
        size, unit = size / 1000, unit + 1
    digits = f"{size:.0f}" if unit == 0 or size >= 100 else f"{size:.3g}"
    sign = "-" if count < 0 else "+" if signed and count else ""
    return f"{sign}{digits} {_UNITS[unit]}"


def show_count(count: int) -> str:
    """A count short enough for a box: ``999``, ``12.3k``, ``7.09M``, ``1.2B``."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= unit:
            scaled = count / (1e3 if name == "k" else unit)
            return f"{scaled:.3g}{name}" if scaled < 999.5 else f"{scaled:,.0f}{name}"
    return f"{count:,}"


def show_duration(seconds: float) -> str:
    """``0.4 s``, ``42 s``, ``3 min 20 s``, ``2 h 5 min``; 0.0 s for less than nothing."""
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def count_of(count: int, one: str, many: str = "") -> str:
    """``1 node``, ``2,000 nodes``; ``many`` where it is not the word with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def count_more(count: int, one: str) -> str:
    """``1 more layer``, ``3 more layers``."""
    return count_of(count, f"more {one}")


def list_names(names: Sequence[str], most: int = 3) -> str:
    """``a, b, c and 4 others``; one more is named rather than counted."""
    if len(names) <= most + 1:
        return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    return f"{', '.join(names[:most])} and {len(names) - most:,} others"


def name_letters(count: int) -> list[str]:
    """A, B, C … for that many things, such as runs that are compared."""
    return [chr(ord("A") + number) if number < 26 else f"R{number + 1}" for number in range(count)]
