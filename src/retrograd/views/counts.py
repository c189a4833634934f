"""Counts as people read them."""

from __future__ import annotations


def count_of(count: int, one: str, many: str = "") -> str:
    """``1 node``, ``2,000 nodes``; ``many`` where it is not the word with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
