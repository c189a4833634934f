"""Rules that put the gradients of several backward passes together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from retrograd.errors import RuleError
from retrograd.rules.rule import Rule, SiteState


class PassRule(Rule):
    """Combines what several backward passes of one step, one a loss, give to the same parameters.

    Torch adds them up. Subclasses write :meth:`combine` instead.
    """

    def combine(self, passes: Sequence[Sequence[Tensor | None]], state: SiteState) -> list[Tensor | None]:
        """Combine the gradients of all passes into what shall be in ``.grad``.

        Args:
            passes: for each pass the gradients of all parameters, in the same order; None where a pass did not reach
                a parameter. None of them may be written into.
            state: one state for all parameters.

        Returns:
            A gradient a parameter; None where no pass reached it.
        """
        raise NotImplementedError

    def __call__(self, value: Tensor, state: SiteState) -> Tensor | None:
        """Always raises: one gradient alone is nothing to combine.

        Raises:
            RuleError: always.
        """
        raise RuleError(
            f"{type(self).__name__} combines several backward passes, and was given the gradient of one.",
            repair="use it on the parameters of a step with one backward pass a loss.",
        )
