"""Where in the forward a node was made, as one record; and who has recorded that last."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from retrograd.core.hooks.torch_calls import plain_name
from retrograd.following.graph.node import Line


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node was made.

    Attributes:
        module: path of the innermost module in whose call it was made; None outside of all.
        call: which call of that module in its forward: 1, 2, …
        line: the user's source line that called the operation; None where that was not noted.
    """

    module: str | None = None
    call: int = 1
    line: Line | None = None

    @property
    def place(self) -> str:
        """``file:line``; empty where the line was not noted."""
        return self.line.place if self.line is not None else ""

    @property
    def operation(self) -> str:
        """The torch function that was called there, ``getitem`` for ``__getitem__``; empty where it is not known."""
        return plain_name(self.line.operation) if self.line is not None else ""


class LatestOrigins:
    """The :class:`Origins` that were entered last, for walks, which need not load what records them.

    They are not held, unless they were let go of before anybody asked them.
    """

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._turn = 0
        self._find: Callable[[], Any] = lambda: None
        self._unheld: Any = None

    def enter(self, origins: Any) -> int:
        """These are entered; returns how many were so far."""
        turn = next(self._turns)
        self._turn, self._find, self._unheld = turn, weakref.ref(origins), None
        return turn

    def is_last(self, turn: int) -> bool:
        """True if none were entered since."""
        return turn == self._turn

    def hold(self, origins: Any) -> None:
        """Hold notes that nobody else holds, until others are entered."""
        self._unheld = origins

    def get(self) -> Any:
        """The origins that were entered last, if somebody still holds them, or has not yet asked them."""
        return self._find() or self._unheld


latest_origins = LatestOrigins()
