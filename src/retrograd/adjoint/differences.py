"""The slope of a function of one number at zero, from its values, with how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_BEND_OF_SMOOTH = 0.75
"""Halving the step halves the difference of the one-sided slopes of a smooth function, and keeps that of a kink."""


@dataclass(frozen=True, slots=True)
class Slope:
    """What finite differences found.

    Attributes:
        value: the slope; NaN where no step gave a number.
        error: an upper estimate of how far off it is: by curvature, by rounding and by kinks.
        is_kinked: the slopes to the left and to the right are not the same.
    """

    value: float
    error: float
    is_kinked: bool


def measure_slope(
    function: Callable[[float], float], steps: Sequence[float], tolerance: float, size: float, noise: float
) -> Slope:
    """The slope at zero: central differences with a step and its half, extrapolated.

    D(h) = (f(h) − f(−h)) / 2h is off by O(h²), and (4 D(h/2) − D(h)) / 3 by O(h⁴) (L. F. Richardson, Phil. Trans.
    R. Soc. A 226, 1927). The steps are tried until one gives an error within the tolerance; else the one with the
    smallest error counts, as in C. J. F. Ridders, Adv. Eng. Software 4(2), 1982.

    Args:
        function: the function; it may return NaN where it is not defined.
        steps: the steps, the likeliest first. By that one, a function that is not constant must be seen to move.
        tolerance: an error that is small enough, relative to the slope or to ``size``, whichever is larger.
        size: what slopes to expect.
        noise: by how much rounding may change a value.
    """
    middle = function(0.0)
    best = Slope(math.nan, math.inf, is_kinked=False)
    for step in steps:
        values = [function(share * step) for share in (-1.0, -0.5, 0.5, 1.0)]
        if all(value == middle for value in values):
            if step == steps[0]:
                return Slope(0.0, 2 * noise / step, is_kinked=False)
            continue  # lost in rounding
        slope = _read_slope(values, middle, step, max(tolerance * size, 4 * noise / step), tolerance, noise)
        if slope.error < best.error:
            best = slope
        if best.error <= tolerance * max(size, abs(best.value)):
            break
    return best


def _read_slope(values: Sequence[float], middle: float, step: float, least: float, share: float, noise: float) -> Slope:
    """The slope from the values at −h, −h/2, h/2 and h, and that in the middle.

    A kink counts if the slopes on both sides differ by more than ``least``, and by more than this share of the slope.
    """
    far_left, left, right, far_right = values
    far, near = (far_right - far_left) / (2 * step), (right - left) / step
    far_bend, bend = abs(far_right - 2 * middle + far_left) / step, 2 * abs(right - 2 * middle + left) / step
    roughness = abs(far_right - 4 * right + 6 * middle - 4 * left + far_left) / (4 * step)  # O(h³) without rounding
    return Slope(
        value=(4 * near - far) / 3,
        error=max(abs(near - far), roughness, 2 * noise / step),
        is_kinked=bend > max(_BEND_OF_SMOOTH * far_bend, least, share * abs(near)),
    )
