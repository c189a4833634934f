"""When the operations of a forward pass are noted: while a plan is to be made, and if plans run some of them again."""

from __future__ import annotations

from retrograd.budget.op_log import Tape
from retrograd.hooks.operation_tap import CarryOut
from retrograd.policies.policy import Stays


class Listening:
    """A tape, and whether it runs.

    Args:
        least: bytes of the smallest stretch that is to be made again.
        is_allowed: whether any is.

    Attributes:
        tape: what was noted of the pass.
    """

    def __init__(self, least: int, *, is_allowed: bool) -> None:
        self.tape = Tape(least)
        self._is_allowed = is_allowed
        self._is_on = False
        self._has_begun = False
        self._is_asked_for = False

    def begin_forward(self, stays: Stays, *, is_of_use: bool, is_new: bool) -> CarryOut | None:
        """What is to see the operations from now on; None where nothing need.

        Args:
            stays: whether a tensor lies in memory that stays anyway.
            is_of_use: there is a plan to be made, or one that has some of them run again.
            is_new: nothing of the pass has been packed.
        """
        self._is_on = self._is_allowed and (is_of_use or self._is_asked_for)
        if not self._is_on:
            return None
        if is_new:
            self.tape.clear()
            self._has_begun = True
        self.tape.stays = stays
        return self.tape.carry_out

    def begin_pass(self) -> bool:
        """The first stretch is packed; returns whether operations are noted."""
        if not self._has_begun:  # a forward that did not begin with a call
            self.tape.clear()
        self._has_begun = False
        return self._is_on

    def ask_for_another(self, was_on: bool) -> bool:
        """Whether a plan has to wait for another pass like the one that has ended, since that one was not noted."""
        self._is_asked_for = self._is_allowed and not was_on and not self._is_asked_for
        return self._is_asked_for
