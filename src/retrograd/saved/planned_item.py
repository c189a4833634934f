"""One stretch of memory under a plan."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from retrograd.saved.carriers import Load
from retrograd.saved.ledger import Ledger
from retrograd.saved.measuring import Log, take_time
from retrograd.saved.policy import Packed

Follow = Callable[[int], None]


class Item(Packed):
    """A stretch of memory that is kept, on its way, elsewhere, or there in fewer bytes.

    Args:
        values: the memory.
        number: of the stretch in its pass.
        log: of the pass.
        ledger: of all bytes that are held.
        follow: called with the number when the stretch is first asked for.
        load: where it is taken.
        small: what holds it in fewer bytes.

    Attributes:
        values: the memory, as long as it is held here.
    """

    __slots__ = ("_charge", "_follow", "_ledger", "_like", "_load", "_log", "_nbytes", "_number", "_small", "values")

    def __init__(
        self,
        values: Tensor,
        number: int,
        log: Log,
        ledger: Ledger,
        follow: Follow,
        load: Load | None = None,
        small: Packed | None = None,
    ) -> None:
        super().__init__(values.nbytes if load is None else 0)
        self._nbytes = values.nbytes
        self._like = values[:0].clone() if values.is_cuda else values.new_empty(0)
        self._number = number
        self._log = log
        self._ledger = ledger
        self._follow = follow
        self._load = load
        self._small = small
        self._charge = 0
        self.values: Tensor | None = None if small is not None else values
        if small is not None:
            self.resident_bytes = small.resident_bytes
        self._hold(self._nbytes if small is None else small.resident_bytes)

    def leave(self) -> None:
        """The memory is freed as soon as nobody else holds it."""
        if self._load is not None and self.values is not None:
            self._load.leave()
            self.values = None
            self._hold(-self._nbytes)

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._load is not None and self.values is None and not self._was_asked:
            self._load.fetch()
            self._hold_again()

    def restore(self) -> Tensor:
        """The values; nobody else has them."""
        began = take_time(self._like)
        is_first = self._begin_asking()
        values = self.values
        if values is None:
            values = self._load.take() if self._load is not None else self._small_values()
            self._hold_again()
        if is_first:
            self._log.note("ask", self._number, began, take_time(self._like))
        return values

    def notice(self) -> None:
        """The memory is there."""
        if self._begin_asking():
            now = take_time(self._like)
            self._log.note("ask", self._number, now, now)

    @property
    def _was_asked(self) -> bool:
        return self._number in self._log.asked

    def _begin_asking(self) -> bool:
        if self._was_asked:
            return False
        self._log.look_after()
        self._log.asked.add(self._number)
        if self._load is not None:
            self._load.want()
        self._follow(self._number)
        return True

    def _small_values(self) -> Tensor:
        assert self._small is not None, "what is not here is elsewhere"
        return self._small.restore()

    def _hold(self, nbytes: int) -> None:
        self._charge += nbytes
        self._ledger.add(nbytes)

    def _hold_again(self) -> None:
        least = self._nbytes if self._small is None else self._nbytes + self._small.resident_bytes
        if self._charge < least:
            self._hold(least - self._charge)

    def __del__(self) -> None:
        if not hasattr(self, "_charge"):
            return
        self._ledger.add(-self._charge)
        now = take_time(self._like)
        self._log.note("free", self._number, now, now)
        self._log.freed.append(self._number)
