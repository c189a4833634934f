"""Whom a rank hands its rows to: one of its ancestors in the tree, or an heir of the rank that wrote."""

from __future__ import annotations

import time
from typing import Any

from retrograd.core.foreign.text import check_kinds
from retrograd.core.merging.links import NoteBoard, RankLink
from retrograd.core.merging.tree import find_ancestors

JOINING_SECONDS = 30.0
"""So long a rank waits, from its beginning, for one above to be there, and for those below to come."""
LOOKING_SECONDS = 5.0
"""So long it looks for one that was there."""

Heirs = list[tuple[int, str]]
"""Ranks that write if the one that does dies, the first of them that lives, and their addresses."""


class RanksAbove:
    """Seeks the rank above, and the next one when it is lost.

    Args:
        rank: our own.
        run: what tells the run from others of the same program.

    Attributes:
        link: to the rank that takes our rows, if there is one.
        heirs: as the rank above tells them.
    """

    def __init__(self, rank: int, run: str) -> None:
        self._rank = rank
        self._run = run
        self._left = find_ancestors(rank)
        self._addresses: dict[int, str] = {}
        self._was_linked = False
        self._deadline = time.monotonic() + JOINING_SECONDS
        self.link: RankLink | None = None
        self.heirs: Heirs = []

    @property
    def is_over(self) -> bool:
        """Tell whether there is nobody left."""
        return not self._left and not self._candidates

    @property
    def _candidates(self) -> Heirs:
        """The heirs that may take our rows: never a higher rank, so that no two take each other's."""
        return [(rank, address) for rank, address in self.heirs if rank < self._rank]

    def seek(self, board: NoteBoard | None, hurry: float, **told: Any) -> RankLink | None:
        """Try once to reach a rank above; one that cannot be reached for long is given up.

        Args:
            board: where addresses are.
            hurry: when to give it up at the latest.
            told: what it is to know of us.
        """
        is_dead = False
        try:
            address = self._find_address(board)
            if address:
                self.link = RankLink(address, self._rank, **told)
                self._was_linked = True
                return self.link
        except ConnectionRefusedError:
            is_dead = self._was_linked  # else what is on the board may be old
        except (RuntimeError, OSError):
            is_dead = False  # it may still come
        if is_dead or self.is_late(hurry):
            self._give_up()
        return None

    def is_late(self, hurry: float) -> bool:
        """Tell whether it was long enough looked for who is not there."""
        return time.monotonic() > min(self._deadline, hurry)

    def _find_address(self, board: NoteBoard | None) -> str | None:
        if not self._left:
            return self._candidates[0][1] if self._candidates else None
        rank = self._left[0]
        try:
            found = None if board is None else board.look(f"{self._run}/{rank}")
        except RuntimeError:  # the notes were lost with the process that kept them
            found = None
        if found:
            self._addresses[rank] = found
        return self._addresses.get(rank)

    def _give_up(self) -> None:
        if self._left:
            del self._left[0]
        else:
            self.heirs = self._candidates[1:]
        self._deadline = time.monotonic() + LOOKING_SECONDS

    def hear(self, told: Any) -> None:
        """Take in who the heirs are.

        Raises:
            ValueError: it is something else.
        """
        check_kinds({"heirs": told}, {"heirs": list[list[Any]]})
        for rank, address in told:
            check_kinds({"rank": rank, "address": address}, {"rank": int, "address": str})
        self.heirs = [(rank, address) for rank, address in told]

    def lose(self) -> None:
        """Hang up, and seek the same rank for a while before the next one."""
        self.close()
        self.link = None
        self._deadline = time.monotonic() + LOOKING_SECONDS

    def close(self) -> None:
        """Hang up."""
        if self.link is not None:
            self.link.close()
