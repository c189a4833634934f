"""A curve in one line of text."""

from __future__ import annotations

import numpy as np

from retrograd.views.downsample import FloatArray, reduce_columns

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = "_.-~=+*#"
"""For where block elements cannot be printed."""

NOT_RECORDED = " "


def draw_sparkline(values: FloatArray, width: int = 24, *, logarithmic: bool = True, blocks: str = BLOCKS) -> str:
    """Draw numbers as blocks of rising height, at most ``width`` of them.

    A block shows the largest of the numbers that share it. Numbers that are not finite are left out, and so are
    those that are not positive on a logarithmic scale, unless all are zero.

    Args:
        values: shape (n,).
        width: how many characters may be used.
        logarithmic: whether heights are those of the logarithms.
        blocks: characters, from the lowest.
    """
    n = len(values)
    if n == 0:
        return ""
    highest = reduce_columns(np.where(np.isfinite(values), values, np.nan)[None, :], -(-n // width)).high[0]
    if logarithmic and np.nanmax(highest, initial=0.0) > 0:
        highest = np.log(np.where(highest > 0, highest, np.nan))
    return "".join(shade_numbers(highest, blocks))


def shade_numbers(values: FloatArray, shades: str, low: float | None = None, high: float | None = None) -> list[str]:
    """A character for each number: the first of ``shades`` for the lowest, the last for the highest.

    Args:
        values: any numbers; NaN becomes :data:`NOT_RECORDED`.
        shades: characters.
        low: number that the first character stands for; the smallest when left out.
        high: number that the last character stands for; the largest when left out.
    """
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return [NOT_RECORDED] * len(values)
    low = float(known.min()) if low is None else low
    high = float(known.max()) if high is None else high
    span = high - low if high > low else 1.0
    places = np.clip((values - low) / span * len(shades), 0, len(shades) - 1)
    return [NOT_RECORDED if np.isnan(place) else shades[int(place)] for place in places]
