"""Which of several optimizers makes the steps: the one that updates most often."""

from __future__ import annotations

from collections.abc import Callable


class Leader:
    """Listens to updates by the numbers of their optimizers.

    An optimizer takes over that updates twice while the leader does not at all, or once while what the leader trains
    does not even run: then another model is trained after the leader's, or apart from it.
    """

    def __init__(self) -> None:
        self._followers: set[int] = set()
        self.number: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether an optimizer makes the steps at all."""
        return self.number is not None

    def update_begins(self, number: int) -> None:
        """An optimizer is about to update; the forwards may come before it has (closures)."""
        if self.number is None:
            self.number = number

    def ends_step(self, number: int, rests: Callable[[], bool] = lambda: False) -> bool:
        """An optimizer has updated; returns whether a step is over thereby.

        Args:
            number: that of the optimizer.
            rests: asked whether what the leader trains has not run in this step, while something else has.
        """
        if self.number in (None, number) or number in self._followers or rests():
            self.number = number
            self._followers.clear()
            return True
        self._followers.add(number)
        return False
