"""A pass that is measured or follows a known plan, and the storage ranges that are packed in it."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from retrograd.core.hooks.saved import blank_like, view_storage
from retrograd.core.limits import LIMITS
from retrograd.memory.budget.measuring import Key, Mark, PassNotes
from retrograd.memory.budget.offloader import Load
from retrograd.memory.budget.plan import Plan
from retrograd.memory.policies.policy import Packed


class ByteCounter:
    """Bytes that are held now: a sum of changes.

    Adding takes no lock: it is done when objects are deleted, whatever runs then. Only :meth:`total` must be called by
    one thread at a time.
    """

    def __init__(self) -> None:
        self._changes: deque[int] = deque()
        self._total = 0

    def add(self, nbytes: int) -> None:
        """Count so many bytes more, or less."""
        self._changes.append(nbytes)

    def total(self) -> int:
        """Bytes held."""
        while self._changes:
            self._total += self._changes.popleft()
        return self._total


@dataclass(slots=True)
class KnownPlan:
    """A plan, and how to tell that a pass is like the one it was made for.

    Attributes:
        keys: of the ranges of that pass.
        plan: for it.
        is_timed: whether its times are those of a pass that followed a plan.
        triggers: range → those to bring back when it is first asked for.
    """

    keys: tuple[Key, ...]
    plan: Plan
    is_timed: bool = False
    triggers: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        events = self.plan.recording.events
        for number, position in self.plan.solution.decisions.fetches.items():
            self.triggers.setdefault(events[position][1], []).append(number)

    def has_at(self, number: int, key: Key) -> bool:
        """Return whether this range of its pass was like that."""
        return number < len(self.keys) and self.keys[number] == key


class KnownPlans:
    """The plans that are remembered; the one used last is forgotten last."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Key, ...], KnownPlan] = OrderedDict()

    @property
    def plans(self) -> list[Plan]:
        """All plans, the one used last at the end."""
        return [known.plan for known in self._known.values()]

    def add(self, keys: Sequence[Key], plan: Plan, *, is_timed: bool = False) -> None:
        """Remember a plan for passes with these ranges."""
        known = KnownPlan(tuple(keys), plan, is_timed)
        self._known[known.keys] = known
        if len(self._known) > LIMITS.plans:
            self._known.popitem(last=False)

    def forget(self, known: KnownPlan) -> None:
        """Forget a plan that was made from a pass unlike others."""
        self._known.pop(known.keys, None)

    def find(self, beginning: Sequence[Key]) -> KnownPlan | None:
        """The one used last of those whose passes begin with these ranges."""
        wanted = tuple(beginning)
        for known in reversed(self._known.values()):
            if known.keys[: len(wanted)] == wanted:
                self._known.move_to_end(known.keys)
                return known
        return None


class PlannedPass:
    """A forward pass, and the backward pass over it.

    Args:
        counter: of all bytes that are held, for this pass and others.

    Attributes:
        log: what is measured of it.
        known: the plan that it follows; None if it is like none that is known.
        items: what was packed.
    """

    def __init__(self, counter: ByteCounter) -> None:
        self.counter = counter
        self.log = PassNotes(counter.total())
        self.known: KnownPlan | None = None
        self.items: list[weakref.ref[Item]] = []
        self._is_alike = True

    def recognise(self, number: int, plans: KnownPlans) -> None:
        """Follow a plan for passes that began like this one, up to this range; none once it is like no other."""
        known, keys = self.known, self.log.keys
        if not self._is_alike or (known is not None and known.has_at(number, keys[number])):
            return
        self.known = plans.find(keys) if known is not None or not number else None
        self._is_alike = self.known is not None
        if known is not None and not self._is_alike:
            self._measure_from_here(known)

    def _measure_from_here(self, known: KnownPlan) -> None:
        """Measure the rest; what it shared with a known pass is as that one has shown."""
        self.log.inherit(known.plan.recording)
        for number, reference in enumerate(self.items):
            item = reference()
            if item is not None and item.values is not None and number not in self.log.left:
                self.log.watch(number, item, item.values)

    def follow(self, number: int) -> None:
        """Bring back what the plan wants to be in flight when this range is asked for."""
        known = self.known
        if known is None:
            self.log.see_end_of_backward()
            return
        for wanted in known.triggers.get(number, ()):
            item = self.items[wanted]() if wanted < len(self.items) else None
            if item is not None:
                item.fetch()


class Item(Packed):
    """A storage range that is kept, in flight or elsewhere.

    Args:
        values: the memory.
        number: of the range in its pass.
        planned_pass: the pass.
        load: where it is taken.

    Attributes:
        number: of the range in its pass.
        nbytes: of the memory.
        log: of the pass.
        values: the memory, as long as it is held here.
    """

    __slots__ = ("_brought_back", "_charge", "_like", "_load", "_pass", "log", "nbytes", "number", "values")

    def __init__(self, values: Tensor, number: int, planned_pass: PlannedPass, load: Load | None = None) -> None:
        super().__init__(values.nbytes if load is None else 0)
        self.nbytes = values.nbytes
        self._like = blank_like(values)
        self.number = number
        self.log = planned_pass.log
        self._pass = planned_pass
        self._load = load
        self._brought_back: tuple[weakref.ref[torch.UntypedStorage], int] | None = None
        self._charge = 0
        self.values: Tensor | None = values
        self._hold(values.nbytes)

    def leave(self) -> None:
        """Free the memory as soon as nobody else holds it."""
        if self._load is not None and self.values is not None:
            self._load.leave()
            self.values = None
            self._hold(-self.nbytes)

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._load is not None and self.values is None and self.number not in self.log.asked:
            self._load.fetch()
            self._hold_again()

    def restore(self) -> Tensor:
        """Return the values; nobody else has them."""
        began = self.log.now(self._like)
        is_first = self._begin_asking()
        values = self._bring_back() if self.values is None else self.values
        if is_first:
            self._end_asking(began)
        return values

    def notice(self) -> None:
        """Record that it is asked for; the memory is there."""
        began = self.log.now(self._like)
        if self._begin_asking():
            self._end_asking(began)

    def _begin_asking(self) -> bool:
        """Record that it is asked for; False if it was before."""
        if self.number in self.log.asked:
            return False
        self.log.look_after()
        self.log.asked.add(self.number)
        if self._load is not None:
            self._load.want()
        self._pass.follow(self.number)
        return True

    def _end_asking(self, began: Mark) -> None:
        self.log.note("ask", self.number, began, self.log.now(self._like))

    def _bring_back(self) -> Tensor:
        values = self._find_again()
        if values is None:
            assert self._load is not None, "what is not here is elsewhere"
            values = self._load.take()
            self._hold_again()
            self._brought_back = weakref.ref(values.untyped_storage()), int(values.storage_offset())
        return values

    def _find_again(self) -> Tensor | None:
        """Find what was brought back before, if it is there still."""
        if self._brought_back is None:
            return None
        storage, offset = self._brought_back[0](), self._brought_back[1]
        return None if storage is None else self._view(storage, offset)

    def _view(self, storage: torch.UntypedStorage, offset: int) -> Tensor:
        return view_storage(storage, self._like, offset, (self.nbytes // self._like.itemsize,), (1,))

    def _hold(self, nbytes: int) -> None:
        self._charge += nbytes
        self._pass.counter.add(nbytes)

    def _hold_again(self) -> None:
        if self._charge < self.nbytes:
            self._hold(self.nbytes - self._charge)

    def __del__(self) -> None:
        if not hasattr(self, "_charge"):
            return
        self._pass.counter.add(-self._charge)
        now = self.log.now(self._like)
        self.log.note("free", self.number, now, now)
        self.log.freed.append(self.number)
