"""Which of several optimizers makes the steps: the one that updates most often."""

from __future__ import annotations


class Leader:
    """Listens to updates by the numbers of their optimizers.

    An optimizer that updates twice while the leader does not at all takes over from it.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._followers: set[int] = set()

    @property
    def is_known(self) -> bool:
        """Whether an optimizer makes the steps at all."""
        return self._number is not None

    def update_begins(self, number: int) -> None:
        """An optimizer is about to update; the forwards may come before it has (closures)."""
        if self._number is None:
            self._number = number

    def ends_step(self, number: int) -> bool:
        """An optimizer has updated; returns whether a step is over thereby."""
        if self._number in (None, number) or number in self._followers:
            self._number = number
            self._followers.clear()
            return True
        self._followers.add(number)
        return False
