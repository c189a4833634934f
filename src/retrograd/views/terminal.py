"""What a terminal can show, and numbers short enough for it."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, TextIO

from retrograd.foreign.plain_text import show_plainly
from retrograd.randomness import random_kept

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_WIDTH = 10_000  # nothing is cut or wrapped for a program that reads along


def open_console(file: TextIO | None = None) -> Console:
    """A console that colours for a terminal and prints plainly, uncut, for anything else."""
    with random_kept():
        from rich.console import Console
    file = sys.stdout if file is None else file
    piped = not file.isatty()
    return Console(file=file, highlight=False, markup=False, emoji=False, width=_PIPED_WIDTH if piped else None)


def can_print(console: Console, text: str) -> bool:
    """Whether the console's encoding has these characters."""
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


def print_name(console: Console, name: str) -> str:
    """A name from a run in characters that the console has, with none that would steer the terminal."""
    return show_plainly(name, keep="").encode(console.encoding, "backslashreplace").decode(console.encoding)


def print_number(value: float) -> str:
    """Three significant digits, or a dash for NaN."""
    if math.isnan(value):
        return "-"
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    return f"{value:.2e}" if abs(value) >= 1e5 or abs(value) < 1e-3 else f"{value:.3g}"


def print_share(value: float) -> str:
    """A share in per cent, or a dash for NaN."""
    return "-" if math.isnan(value) else f"{100 * value:.1f}%"
