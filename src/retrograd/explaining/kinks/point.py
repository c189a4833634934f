"""A kind of point at which a function has no derivative, and what torch takes for a gradient there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from retrograd.core.amounts import count_of
from retrograd.core.hooks.engine import TORCH

_NODE = re.compile(r"Backward\d*$")


@dataclass(frozen=True, slots=True)
class Point:
    """A kind of point of one operation.

    Attributes:
        operation: what people call it: ``relu``.
        where: which points: ``at 0``.
        convention: by what rule torch takes a gradient there.
        gives: that gradient, in words, for an incoming one of one.
        example: source of a function of ``x`` that shows it, with ``torch`` and ``F``.
        at: the point, an element each.
        gradient: what torch gives there.
        find: which elements of what the operation is called with lie there; None where the operation is made of
            others in this table, or where nothing is wrong there.
        names: names that torch has for the operation below autograd, without overloads; its own when left out.
        of: the argument whose gradient is meant.
        is_usual: that elements lie there is nothing to wonder about: zeros in front of a ReLU.
        since: the first torch that does so, as ``(2, 14)``; None where all that are supported do.
        before: the first torch that no longer does.
    """

    operation: str
    where: str
    convention: Convention
    gives: str
    example: str
    at: tuple[float, ...]
    gradient: tuple[float, ...]
    find: Callable[[Mapping[str, Any]], Tensor] | None = None
    names: tuple[str, ...] = ()
    of: str = "self"
    is_usual: bool = False
    since: tuple[int, int] | None = None
    before: tuple[int, int] | None = None

    @property
    def holds(self) -> bool:
        """True if the torch that runs does so."""
        return (self.since is None or self.since <= TORCH) and (self.before is None or self.before > TORCH)

    @property
    def keys(self) -> set[str]:
        """Keys by which it is looked up: see :func:`key_of`."""
        return {key_of(name) for name in self.names or (self.operation,)}

    @property
    def is_finite(self) -> bool:
        """True if torch gives numbers there."""
        return all(map(math.isfinite, self.gradient))

    def __str__(self) -> str:
        return f"{self.operation} {self.where}"


def describe_elements(point: Point, count: int, total: int) -> str:
    """Describe elements, as in ``relu at 0 (3 of 12 elements: torch gives 0, the subgradient of least norm)``."""
    return f"{point} ({count:,} of {count_of(total, 'element')}: torch gives {point.gives}, {point.convention.value})"


def key_of(name: str) -> str:
    """Give an operation and the node that it makes one key: ``maxpool2dwithindices``.

    Args:
        name: ``max_pool2d_with_indices`` or ``MaxPool2DWithIndicesBackward0``; in place or not.
    """
    return _NODE.sub("", name).replace("_", "").lower()


# ---- what torch takes ----


class Convention(Enum):
    """Kinds of gradients at a point without a derivative.

    The first six are the rules of torch's note "Autograd mechanics: gradients for non-differentiable functions", in
    their order. The last two are what torch does in places besides.

    Attributes:
        GRADIENT: the function has a derivative there after all.
        SUBGRADIENT: it is convex there: of all slopes that stay below it, the one of least norm.
        SUPERGRADIENT: it is concave there: of all slopes that stay above it, the one of least norm.
        LIMIT: the derivative close by, continued; it may be infinite, and of several limits it is one.
        ARBITRARY: the function, or every limit, is not defined there.
        ZERO: the function has no gradient at all, as what is drawn at random.
        ONE_SIDE: a slope that stays below it (or above), but not the one of least norm: that of one side, of one tie.
        NONE_OF_THEM: it is none of these, though there is one.
    """

    GRADIENT = "its gradient"
    SUBGRADIENT = "the subgradient of least norm"
    SUPERGRADIENT = "the supergradient of least norm"
    LIMIT = "a limit of the gradient close by"
    ARBITRARY = "not defined there: arbitrary"
    ZERO = "zero, as it has no gradient"
    ONE_SIDE = "the slope of one side, not the one of least norm"
    NONE_OF_THEM = "none that the rules name"
