"""One stretch of memory under a plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from retrograd.budget.backends import Load
from retrograd.budget.ledger import Ledger
from retrograd.budget.marks import Mark
from retrograd.budget.measuring import Log
from retrograd.budget.recipe import Rerun
from retrograd.hooks.saved import blank_like, version_of, view_storage
from retrograd.policies.policy import Packed

Follow = Callable[[int], None]


class Attempt(Protocol):
    """Finds out whether a stretch can be made again."""

    @property
    def is_possible(self) -> bool:
        """Whether it can be tried now."""

    def __call__(self, item: Item, values: Tensor) -> None:
        """Try, and note how it went."""


class Item(Packed):
    """A stretch of memory that is kept, on its way, elsewhere, there in fewer bytes, or to be made again.

    Args:
        values: the memory.
        number: of the stretch in its pass.
        log: of the pass.
        ledger: of all bytes that are held.
        follow: called with the number when the stretch is first asked for.
        load: where it is taken.
        small: what holds it in fewer bytes.
        rerun: how it is made again.

    Attributes:
        number: of the stretch in its pass.
        nbytes: of the memory.
        log: of the pass.
        values: the memory, as long as it is held here.
        trial: given it and the memory when it is first asked for.
        witness: counts writes with the program's tensors that have the memory; None where nobody else has it.
        version: how often it had been written to.
    """

    __slots__ = (
        "_brought_back", "_charge", "_follow", "_ledger", "_like", "_load", "_rerun", "_small", "log", "nbytes",
        "number", "trial", "values", "version", "witness",
    )  # fmt: skip

    def __init__(
        self,
        values: Tensor,
        number: int,
        log: Log,
        ledger: Ledger,
        follow: Follow,
        load: Load | None = None,
        small: Packed | None = None,
        rerun: Rerun | None = None,
    ) -> None:
        nbytes = values.nbytes
        super().__init__(nbytes if load is None else 0)
        self.nbytes = nbytes
        self._like = blank_like(values)
        self.number = number
        self.log = log
        self._ledger = ledger
        self._follow = follow
        self._load = load
        self._small = small
        self._rerun = rerun
        self.trial: Attempt | None = None
        self.witness: Tensor | None = None
        self.version = 0
        self._brought_back: tuple[weakref.ref[torch.UntypedStorage], int] | None = None
        self._charge = 0
        is_here = small is None and rerun is None
        self.values: Tensor | None = values if is_here else None
        if not is_here:
            self.resident_bytes = 0 if small is None else small.resident_bytes
        self._hold(nbytes if is_here else self.resident_bytes)

    def leave(self) -> None:
        """The memory is freed as soon as nobody else holds it."""
        if self._load is not None and self.values is not None:
            self._load.leave()
            self.values = None
            self._hold(-self.nbytes)

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._load is not None and self.values is None and not self._was_asked:
            self._load.fetch()
            self._hold_again()

    def restore(self) -> Tensor:
        """The values; nobody else has them."""
        began = self.log.now(self._like)
        is_first = self._begin_asking()
        values = self.lend(is_kept=False)
        if is_first:
            self._end_asking(began, values)
        return values

    def notice(self) -> None:
        """The memory is there."""
        began = self.log.now(self._like)
        if self._begin_asking():
            self._end_asking(began, self.values)

    @property
    def is_as_it_was(self) -> bool:
        """Whether the program has not written to the memory since; if it has, what is elsewhere may be changed too."""
        return self.witness is None or version_of(self.witness) == self.version

    def lend(self, *, is_kept: bool) -> Tensor:
        """The values, for another stretch to be made of; from now on they may be kept."""
        values = self._bring_back() if self.values is None else self.values
        if is_kept:
            self.values = values
        return values

    @property
    def _was_asked(self) -> bool:
        return self.number in self.log.asked

    def _begin_asking(self) -> bool:
        if self._was_asked:
            return False
        self.log.look_after()
        self.log.asked.add(self.number)
        if self._load is not None:
            self._load.want()
        self._follow(self.number)
        return True

    def _end_asking(self, began: Mark, values: Tensor | None) -> None:
        trial, self.trial = self.trial, None
        if trial is not None and values is not None:
            trial(self, values)
        self.log.note("ask", self.number, began, self.log.now(self._like))

    def _bring_back(self) -> Tensor:
        values = self._find_again()
        if values is None:
            if self._load is not None:
                values = self._load.take()
            elif self._rerun is not None:
                values = self._view(self._rerun.run()[0], 0)
            else:
                assert self._small is not None, "what is not here is elsewhere"
                values = self._small.restore()
            self._hold_again()
            self._brought_back = weakref.ref(values.untyped_storage()), int(values.storage_offset())
        return values

    def _find_again(self) -> Tensor | None:
        """What was brought back before, if it is there still."""
        if self._brought_back is None:
            return None
        storage, offset = self._brought_back[0](), self._brought_back[1]
        return None if storage is None else self._view(storage, offset)

    def _view(self, storage: torch.UntypedStorage, offset: int) -> Tensor:
        return view_storage(storage, self._like, offset, (self.nbytes // self._like.itemsize,), (1,))

    def _hold(self, nbytes: int) -> None:
        self._charge += nbytes
        self._ledger.add(nbytes)

    def _hold_again(self) -> None:
        least = self.nbytes if self._small is None else self.nbytes + self._small.resident_bytes
        if self._charge < least:
            self._hold(least - self._charge)

    def __del__(self) -> None:
        if not hasattr(self, "_charge"):
            return
        self._ledger.add(-self._charge)
        now = self.log.now(self._like)
        self.log.note("free", self.number, now, now)
        self.log.freed.append(self.number)
