"""Facts about losses: what the sums are that one is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from retrograd.core.history.fact import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts(Fact):
    """Sums of what operations made that a backward pass began from, when it was looked at.

    ``name`` is that of the model, as of :class:`~retrograd.core.history.facts.Operations`, ``value`` the loss.

    Attributes:
        line: of the operation that made the loss.
        called: where backward was called.
        loss: number of that operation among those of the pass, as they were last noted.
        numbers: numbers of operations whose result is a single number, or is added to another that is none: what the
            loss is made of, and what has left torch by ``item()``.
        values: the sums of these results.
        equal: numbers of differences, ratios and distances of two tensors with a graph that were equal, bit for bit.
    """

    kind = "terms"
    line: str = ""
    called: str = ""
    loss: int = -1
    numbers: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    equal: tuple[int, ...] = ()

    def sum_of(self, number: int) -> float:
        """The sum of what an operation made; NaN where it is not known."""
        return self.values[self.numbers.index(number)] if number in self.numbers else math.nan
