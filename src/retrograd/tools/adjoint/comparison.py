"""⟨J v, u⟩ beside ⟨v, Jᵀ u⟩, for one call, one variable and one pair of probes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from retrograd.tools.adjoint.module_call import DifferentiableCall
from retrograd.tools.adjoint.numerics import Precision, draw_like, inner_product, measure_size
from retrograd.tools.adjoint.variable import Variable


class Agreement(Enum):
    """The outcome of a comparison."""

    AGREES = "agrees"
    DIFFERS = "differs"
    OPEN = "open"
    """The finite differences do not settle, and there is no forward mode that agrees."""


class RandomProbe:
    """Random cotangents u of a call's outputs, and a random tangent v of one of its variables.

    Args:
        call: the call.
        generator: what they are drawn from.
    """

    def __init__(self, call: DifferentiableCall, generator: torch.Generator) -> None:
        self.cotangents = [draw_like(output, generator) for output in call.outputs]
        self.tangents = [variable.draw_tangent(generator) for variable in call.variables]


@dataclass(frozen=True, slots=True)
class AdjointComparison:
    """Both sides of ⟨J v, u⟩ = ⟨v, Jᵀ u⟩.

    Attributes:
        backward: ⟨v, Jᵀ u⟩ by a backward pass.
        forward_mode: ⟨J v, u⟩ by forward mode; None where there is none.
        slope: ⟨J v, u⟩ by finite differences.
        size: of a typical ⟨v, Jᵀ u⟩: the norm of Jᵀ u, as the elements of v have variance one.
        precision: of the module.
    """

    backward: float
    forward_mode: float | None
    slope: Slope
    size: float
    precision: Precision

    @property
    def by_forward_mode(self) -> bool:
        """Whether forward mode is the better witness: finite differences agree with it, or tell nothing."""
        return self.forward_mode is not None and (
            not self._is_settled or abs(self.forward_mode - self.slope.value) <= self._allowed(self.slope.value)
        )

    @property
    def forward(self) -> float:
        """⟨J v, u⟩."""
        return self.forward_mode if self.by_forward_mode and self.forward_mode is not None else self.slope.value

    @property
    def scale(self) -> float:
        """The size that differences are relative to."""
        sizes = (abs(self.backward), abs(self.forward), self.size)
        return max([size for size in sizes if math.isfinite(size)], default=0.0)

    @property
    def difference(self) -> float:
        """|⟨J v, u⟩ − ⟨v, Jᵀ u⟩|, relative to the largest of both and of the norm of Jᵀ u."""
        apart = abs(self.forward - self.backward)
        return apart / self.scale if self.scale else apart

    @property
    def tolerance(self) -> float:
        """The largest :attr:`difference` that counts as none."""
        if self.by_forward_mode and not self._is_settled:
            return self.precision.forward_mode
        return self._allowed(self.slope.value) / self.scale if self.scale else self.precision.differences

    @property
    def outcome(self) -> Agreement:
        """The outcome. Finite differences have the last word: forward mode knows nothing of what ``detach`` hides."""
        if not math.isfinite(self.backward):
            return Agreement.OPEN
        if self.slope.value == self.size == 0:  # it depends on nothing, and gives nothing
            return Agreement.AGREES
        if self._is_settled:
            agrees = abs(self.slope.value - self.backward) <= self._allowed(self.slope.value)
            return Agreement.AGREES if agrees else Agreement.DIFFERS
        if self.forward_mode is None or self.slope.is_kinked:
            return Agreement.OPEN
        agrees = abs(self.forward_mode - self.backward) <= self.precision.forward_mode * self.scale
        return Agreement.AGREES if agrees else Agreement.OPEN

    @property
    def _is_settled(self) -> bool:
        """Whether finite differences are exact enough to tell something."""
        return self.slope.error <= self.precision.settled * max(abs(self.backward), abs(self.slope.value), self.size)

    def _allowed(self, value: float) -> float:
        return self.precision.differences * max(abs(self.backward), abs(value), self.size) + 2 * self.slope.error


def compare(
    call: DifferentiableCall, index: int, tangent: Tensor, cotangents: Sequence[Tensor], gradient: Tensor
) -> AdjointComparison:
    """Compute both sides.

    Args:
        call: the call.
        index: which of its variables the derivative is taken with respect to.
        tangent: v, of the variable's shape.
        cotangents: u, one for each output.
        gradient: Jᵀ u, of the variable's shape.
    """
    variable, precision = call.variables[index], call.precision
    backward = inner_product(tangent, gradient)
    if not math.isfinite(backward):
        return AdjointComparison(backward, None, Slope(math.nan, math.inf, is_kinked=False), math.nan, precision)
    size = math.sqrt(inner_product(gradient, gradient))
    slope = measure_along(call, variable, tangent, cotangents, size)
    return AdjointComparison(backward, call.push_forward(variable, tangent, cotangents), slope, size, precision)


def measure_along(
    call: DifferentiableCall, variable: Variable, tangent: Tensor, cotangents: Sequence[Tensor], size: float
) -> Slope:
    """⟨J v, u⟩ by finite differences.

    Args:
        call: the call.
        variable: what is moved.
        tangent: v, of its shape.
        cotangents: u, one for each output.
        size: how large a result is typical.
    """
    step = measure_size(variable.tensor.detach())
    function = call.function_along(variable, tangent, cotangents)
    steps = [step * each for each in call.precision.steps]
    return measure_slope(function, steps, call.precision.differences / 10, size, call.noise)


# ---- differences ----

_BEND_OF_SMOOTH = 0.75
"""Halving the step halves the difference of the one-sided slopes of a smooth function, and keeps that of a kink."""


@dataclass(frozen=True, slots=True)
class Slope:
    """A slope by finite differences.

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
