"""⟨J v, u⟩ beside ⟨v, Jᵀ u⟩, for one call, one variable and one pair of probes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from retrograd.adjoint.differences import Slope, measure_slope
from retrograd.adjoint.module_call import ModuleCall
from retrograd.adjoint.precision import Precision
from retrograd.adjoint.variable import Variable
from retrograd.adjoint.vectors import draw_like, inner_product, measure_size


class Outcome(Enum):
    """What a comparison says."""

    AGREES = "agrees"
    DIFFERS = "differs"
    OPEN = "open"
    """The finite differences do not settle, and there is no forward mode that agrees."""


class Probe:
    """Random cotangents u of a call's outputs, and a random tangent v of one of its variables.

    Args:
        call: the call.
        generator: what they are drawn from.
    """

    def __init__(self, call: ModuleCall, generator: torch.Generator) -> None:
        self.cotangents = [draw_like(output, generator) for output in call.outputs]
        self.tangents = [variable.draw_tangent(generator) for variable in call.variables]


@dataclass(frozen=True, slots=True)
class Comparison:
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
        """What differences are relative to."""
        sizes = (abs(self.backward), abs(self.forward), self.size)
        return max([size for size in sizes if math.isfinite(size)], default=0.0)

    @property
    def difference(self) -> float:
        """|⟨J v, u⟩ − ⟨v, Jᵀ u⟩|, relative to the largest of both and of the norm of Jᵀ u."""
        apart = abs(self.forward - self.backward)
        return apart / self.scale if self.scale else apart

    @property
    def tolerance(self) -> float:
        """How large that difference may be."""
        if self.by_forward_mode and not self._is_settled:
            return self.precision.forward_mode
        return self._allowed(self.slope.value) / self.scale if self.scale else self.precision.differences

    @property
    def outcome(self) -> Outcome:
        """What it says. Finite differences have the last word: forward mode knows nothing of what ``detach`` hides."""
        if not math.isfinite(self.backward):
            return Outcome.OPEN
        if self.slope.value == self.size == 0:  # it depends on nothing, and gives nothing
            return Outcome.AGREES
        if self._is_settled:
            agrees = abs(self.slope.value - self.backward) <= self._allowed(self.slope.value)
            return Outcome.AGREES if agrees else Outcome.DIFFERS
        if self.forward_mode is None or self.slope.is_kinked:
            return Outcome.OPEN
        agrees = abs(self.forward_mode - self.backward) <= self.precision.forward_mode * self.scale
        return Outcome.AGREES if agrees else Outcome.OPEN

    @property
    def _is_settled(self) -> bool:
        """Whether finite differences are exact enough to tell something."""
        return self.slope.error <= self.precision.settled * max(abs(self.backward), abs(self.slope.value), self.size)

    def _allowed(self, value: float) -> float:
        return self.precision.differences * max(abs(self.backward), abs(value), self.size) + 2 * self.slope.error


def compare(
    call: ModuleCall, index: int, tangent: Tensor, cotangents: Sequence[Tensor], gradient: Tensor
) -> Comparison:
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
        return Comparison(backward, None, Slope(math.nan, math.inf, is_kinked=False), math.nan, precision)
    size = math.sqrt(inner_product(gradient, gradient))
    slope = measure_along(call, variable, tangent, cotangents, size)
    return Comparison(backward, call.push_forward(variable, tangent, cotangents), slope, size, precision)


def measure_along(
    call: ModuleCall, variable: Variable, tangent: Tensor, cotangents: Sequence[Tensor], size: float
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
