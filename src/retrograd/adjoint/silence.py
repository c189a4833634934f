"""What it means that no gradient arrives and that nothing moves: both sides of a comparison are zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retrograd.adjoint.module_call import ModuleCall
from retrograd.adjoint.vectors import measure_size

_SMALL_STEP = 0.1
_STEPS = (0.1, 1.0, 3.0)
"""Relative to the root mean square of what is moved."""
_FEW_ELEMENTS, _MANY_DRAWS, _FEW_DRAWS = 64, 64, 8
"""Of many elements some change at each draw."""


class Silence:
    """One call and one of its variables, of which the gradient is zero.

    Args:
        call: the call.
        index: which of its variables.
        cotangents: by which changes of its outputs are seen.
        generator: for directions.
    """

    def __init__(self, call: ModuleCall, index: int, cotangents: Sequence[Tensor], generator: torch.Generator) -> None:
        self._call = call
        self._variable = call.variables[index]
        self._cotangents = cotangents
        self._generator = generator
        self._size = measure_size(self._variable.tensor.detach())

    def is_drawn(self) -> bool:
        """Whether what is returned is drawn at random, be it with probabilities that are given."""
        function = self._function()
        value = function(0.0)

        def differs(seed: int) -> bool:
            with self._call.drawing_otherwise(seed):
                return self._differ(function(0.0), value)

        returned = sum(output.numel() for output in self._call.outputs)
        return any(map(differs, range(_FEW_DRAWS if returned < _FEW_ELEMENTS else 1)))

    def depends_by_chance(self) -> bool:
        """Whether a small step changes what is drawn, by some other random numbers.

        With the same numbers a sample rarely changes, however much its probabilities do.
        """
        draws = _MANY_DRAWS if self._variable.tensor.numel() < _FEW_ELEMENTS else _FEW_DRAWS
        return any(self._jumps_at(seed) for seed in range(draws))

    def depends(self) -> bool:
        """Whether it changes some way off."""
        function = self._function()
        value = function(0.0)
        return any(self._differ(function(sign * step * self._size), value) for step in _STEPS for sign in (1, -1))

    def _jumps_at(self, seed: int) -> bool:
        function = self._function()
        with self._call.drawing_otherwise(seed):
            value, moved = function(0.0), function(_SMALL_STEP * self._size)
            if math.isnan(moved):  # it has left the domain, as odds do; the mean lies in it
                moved = self._towards_the_mean()(_SMALL_STEP)
            return self._differ(moved, value)

    def _towards_the_mean(self) -> Callable[[float], float]:
        values = self._variable.tensor.detach()
        return self._call.function_along(self._variable, values.mean() - values, self._cotangents)

    def _function(self) -> Callable[[float], float]:
        tangent = self._variable.draw_tangent(self._generator)
        return self._call.function_along(self._variable, tangent, self._cotangents)

    def _differ(self, one: float, other: float) -> bool:
        return abs(one - other) > 2 * self._call.noise
