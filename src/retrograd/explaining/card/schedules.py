"""The shape of a schedule of learning rates, said as far as its numbers show it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from retrograd.core.amounts import count_of
from retrograd.explaining.card.words import show

FloatArray = npt.NDArray[np.float64]

NEAR = 0.01
"""How far a rate may be from a shape, as a share of the range: the figures on a card have so many digits."""

FEWEST = 6
"""Different rates that make a shape; of fewer each is said."""


def describe_shape(rates: FloatArray) -> str:
    """The shape of the learning rates of all updates: ``rises over 20 updates (linear), then falls as a cosine``.

    Args:
        rates: finite, one for each update.
    """
    if len(rates) < 2 or np.ptp(rates) <= 1e-9 * rates.max():
        return "constant"
    top = int(rates.argmax())
    rise = rates[: top + 1]
    if top and (np.diff(rise) < -1e-12).any():
        return f"goes up and down between {show(rates.min())} and {show(rates.max())}"
    said = [f"rises over {count_of(top, 'update')}{_tell_rise(rise)}"] if top else []
    rest = rates[top:]
    if len(rest) > 1:
        said.append(_describe_rest(rest))
    return ", then ".join(said)


def _tell_rise(rise: FloatArray) -> str:
    if len(rise) < FEWEST:
        return ""
    line = np.linspace(rise[0], rise[-1], len(rise))
    return " in a line" if _is_near(rise, line) else ""


def _describe_rest(rates: FloatArray) -> str:
    """The shape of rates that begin with the highest."""
    changes = np.flatnonzero(np.diff(rates)) + 1
    if not len(changes):
        return "constant"
    if (np.diff(rates) > 1e-12).any():
        return f"goes up and down between {show(rates.min())} and {show(rates.max())}"
    starts = np.array([0, *changes])
    gaps, ratios = np.diff(starts), rates[starts[1:]] / rates[starts[:-1]]
    if len(changes) > 1 and gaps[0] > 1 and (gaps == gaps[0]).all() and np.ptp(ratios) <= 1e-6:
        return f"falls by ×{ratios[0]:.4g} every {gaps[0]:,} updates"
    if len(changes) < FEWEST - 1:
        places = ", ".join(f"to {show(rates[place])} after {place:,}" for place in changes[:3])
        return f"falls in {count_of(len(changes), 'step')} ({places}{', …' if len(changes) > 3 else ''})"
    pace = f", every {gaps[0]:,} updates" if gaps[0] > 1 and (gaps == gaps[0]).all() else ""
    return f"falls{_find_fall(starts, rates[starts])}{pace}"


def _find_fall(places: npt.NDArray[np.int64], rates: FloatArray) -> str:
    share = places / places[-1]
    high, low = rates[0], rates[-1]
    fits: list[tuple[str, Callable[[], FloatArray]]] = [
        (" in a line", lambda: high + (low - high) * share),
        (" as a cosine", lambda: low + (high - low) * (1 + np.cos(np.pi * share)) / 2),
        (" as a cosine, not yet at its end", lambda: high * (1 + np.cos(np.arccos(2 * low / high - 1) * share)) / 2),
    ]
    if low > 0:
        factor = (low / high) ** (1 / (len(rates) - 1))
        fits.append((f" by ×{factor:.4g} each time", lambda: high * (low / high) ** share))
        fits.append((" as 1/√step", lambda: 1 / np.sqrt(high**-2 + (low**-2 - high**-2) * share)))
    return next((words for words, curve in fits if _is_near(rates, curve())), "")


def _is_near(rates: FloatArray, curve: FloatArray) -> bool:
    return bool(np.abs(rates - curve).max() <= NEAR * np.ptp(rates))
