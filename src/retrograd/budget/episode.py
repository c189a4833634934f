"""A pass under a plan, or one that is measured for a plan."""

from __future__ import annotations

import weakref

from retrograd.budget.item import Item
from retrograd.budget.known_plans import Known, KnownPlans
from retrograd.budget.measuring import Log


class Episode:
    """A pass that is under way.

    Args:
        background: bytes of earlier passes when it began.
        is_taped: whether the operations of the forward are seen.

    Attributes:
        log: notes of it.
        known: the plan that it follows; None if it is like none that is known.
        is_taped: whether the operations of the forward are seen.
        items: what was packed.
    """

    def __init__(self, background: int, is_taped: bool) -> None:
        self.log = Log(background)
        self.is_taped = is_taped
        self.known: Known | None = None
        self.items: list[weakref.ref[Item]] = []
        self._is_alike = True

    def recognise(self, number: int, plans: KnownPlans) -> None:
        """Follow a plan for passes that began like this one, up to this stretch; none once it is like no other."""
        known, keys = self.known, self.log.keys
        if not self._is_alike or (known is not None and known.has_at(number, keys[number])):
            return
        self.known = plans.find(keys) if known is not None or not number else None
        self._is_alike = self.known is not None
        if known is not None and not self._is_alike:
            self._measure_from_here(known)

    def _measure_from_here(self, known: Known) -> None:
        """What it shared with a known pass is as that one has shown; the rest is measured."""
        self.log.inherit(known.plan.recording)
        for number, reference in enumerate(self.items):
            item = reference()
            if item is not None and item.values is not None and number not in self.log.left:
                self.log.watch(number, item, item.values)

    def follow(self, number: int) -> None:
        """A stretch is asked for: bring back what the plan wants to be on its way now."""
        known = self.known
        if known is None:
            self.log.see_end_of_backward()
            if len(self.log.asked) == 1:
                self._give_up_trials()
        for wanted in () if known is None else known.triggers.get(number, ()):
            item = self.items[wanted]() if wanted < len(self.items) else None
            if item is not None:
                item.fetch()

    def _give_up_trials(self) -> None:
        """Of what could not be made again when the backward pass begins.

        When its own time comes it may be possible: then a part of a model that is sharded has its parameters again. But
        what is made of it may be asked for earlier.
        """
        for reference in self.items:
            item = reference()
            if item is not None and item.trial is not None and not item.trial.is_possible:
                item.trial = None
