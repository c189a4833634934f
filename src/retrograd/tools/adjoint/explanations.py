"""Explanations of a gradient that is wrong (a factor, a transpose, a conjugate), and of one that is zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retrograd.tools.adjoint.comparison import AdjointComparison, RandomProbe, compare, measure_along
from retrograd.tools.adjoint.module_call import DifferentiableCall
from retrograd.tools.adjoint.numerics import inner_product, measure_size

_MORE_PROBES = 2
_LEFT_OPEN = 1e-2
"""What part of the mismatch a guess may leave unexplained."""


class Suspect:
    """A call and a variable whose gradient is wrong, to be held against one guess after the other.

    Args:
        call: the call.
        index: which of its variables.
        probe: that for which it was found.
        comparison: what was found.
        generator: for more probes.
    """

    def __init__(
        self,
        call: DifferentiableCall,
        index: int,
        probe: RandomProbe,
        comparison: AdjointComparison,
        generator: torch.Generator,
    ) -> None:
        self._call = call
        self._variable = call.variables[index]
        self._index = index
        self._comparison = comparison
        self._tangent = probe.tangents[index]
        self._cotangents = probe.cotangents
        self._gradient = call.pull_back(probe.cotangents)[index]
        self._others = [self._compare(RandomProbe(call, generator)) for _ in range(_MORE_PROBES)]

    def describe(self) -> str:
        """The first guess that explains the numbers, as the end of a sentence."""
        guesses: Sequence[Callable[[], str]] = (
            self._is_nothing,
            self._is_cut,
            self._has_factor,
            self._is_conjugated,  # of c · z the derivative is its own transpose: only the conjugate is missing
            self._is_transposed,
        )
        return next(filter(None, (guess() for guess in guesses)), "no simple pattern: not a factor, nor a transpose")

    def _is_nothing(self) -> str:
        if bool(self._gradient.any()):
            return ""
        return "no gradient arrives, though the output depends on it: it is ignored, or a detach() cuts it off"

    def _is_cut(self) -> str:
        forward_mode = self._comparison.forward_mode
        if forward_mode is None or not self._explains(forward_mode, self._comparison.backward):
            return ""
        return "forward mode misses the same part: a detach() cuts off one of several ways to the output"

    def _has_factor(self) -> str:
        pairs = [(each.backward, each.slope.value) for each in (self._comparison, *self._others)]
        factor = sum(back * true for back, true in pairs) / sum(true * true for _, true in pairs)
        if any(abs(back - factor * true) > _LEFT_OPEN * abs(back - true) for back, true in pairs):
            return ""
        words = (
            "its sign is flipped" if abs(factor + 1) < _LEFT_OPEN else f"it is {factor:.4g} times the right gradient"
        )
        return f"{words}: a constant factor"

    def _is_transposed(self) -> str:
        gradient = self._gradient
        if gradient.ndim >= 2 and gradient.shape[-1] == gradient.shape[-2]:
            turned = inner_product(self._tangent, gradient.mT)
            if self._explains(turned, self._comparison.slope.value):
                return "it is the transpose of the right gradient"
        if len(self._cotangents) == 1 and self._cotangents[0].shape == self._tangent.shape:
            swapped = self._slope(self._cotangents[0].to(self._tangent.dtype), [self._tangent])
            if self._explains(swapped, self._comparison.backward):
                return "the derivative itself is applied where its transpose belongs: a weight is transposed"
        return ""

    def _is_conjugated(self) -> str:
        if not self._tangent.is_complex():
            return ""
        conjugate = self._slope(self._tangent.conj(), [each.conj() for each in self._cotangents])
        return "a complex conjugate is missing" if self._explains(conjugate, self._comparison.backward) else ""

    def _explains(self, guess: float, wanted: float) -> bool:
        mismatch = abs(self._comparison.backward - self._comparison.slope.value)
        return abs(guess - wanted) <= _LEFT_OPEN * mismatch

    def _slope(self, tangent: Tensor, cotangents: list[Tensor]) -> float:
        resolved = [cotangent.resolve_conj() for cotangent in cotangents]
        return measure_along(self._call, self._variable, tangent.resolve_conj(), resolved, 0.0).value

    def _compare(self, probe: RandomProbe) -> AdjointComparison:
        gradient = self._call.pull_back(probe.cotangents)[self._index]
        return compare(self._call, self._index, probe.tangents[self._index], probe.cotangents, gradient)


# ---- silence ----

_SMALL_STEP = 0.1
_STEPS = (0.1, 1.0, 3.0)
"""Relative to the root mean square of what is moved."""
_FEW_ELEMENTS, _MANY_DRAWS, _FEW_DRAWS = 64, 64, 8
"""Of many elements some change at each draw."""


class Silence:
    """A call and one of its variables, whose gradient is zero.

    Args:
        call: the call.
        index: which of its variables.
        cotangents: by which changes of its outputs are seen.
        generator: for directions.
    """

    def __init__(
        self, call: DifferentiableCall, index: int, cotangents: Sequence[Tensor], generator: torch.Generator
    ) -> None:
        self._call = call
        self._variable = call.variables[index]
        self._cotangents = cotangents
        self._generator = generator
        self._size = measure_size(self._variable.tensor.detach())

    def is_drawn(self) -> bool:
        """Return whether the outputs are drawn at random, be it with probabilities that are given."""
        function = self._function()
        value = function(0.0)

        def differs(seed: int) -> bool:
            with self._call.drawing_otherwise(seed):
                return self._differ(function(0.0), value)

        returned = sum(output.numel() for output in self._call.outputs)
        return any(map(differs, range(_FEW_DRAWS if returned < _FEW_ELEMENTS else 1)))

    def depends_by_chance(self) -> bool:
        """Return whether a small step changes what is drawn, by some other random numbers.

        With the same numbers a sample rarely changes, however much its probabilities do.
        """
        draws = _MANY_DRAWS if self._variable.tensor.numel() < _FEW_ELEMENTS else _FEW_DRAWS
        return any(self._jumps_at(seed) for seed in range(draws))

    def depends(self) -> bool:
        """Return whether the outputs change some way off."""
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
