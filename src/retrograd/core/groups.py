"""Things by what they have in common, and what some lead to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def gather(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """The second of each pair by the first, both in the order in which they come."""
    found: dict[K, list[T]] = {}
    for key, each in pairs:
        found.setdefault(key, []).append(each)
    return found


def reach(begun: Iterable[K], leads_to: Callable[[K], Iterable[K]]) -> set[K]:
    """All that some lead to, themselves among them; ``leads_to`` says what one leads to at once."""
    waiting = list(begun)
    found = set(waiting)
    for each in waiting:  # which grows
        fresh = set(leads_to(each)) - found
        found |= fresh
        waiting += fresh
    return found
