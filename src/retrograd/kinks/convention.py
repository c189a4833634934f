"""What torch takes for a gradient where a function has no derivative."""

from __future__ import annotations

from enum import Enum


class Convention(Enum):
    """What a gradient is at such a point.

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
