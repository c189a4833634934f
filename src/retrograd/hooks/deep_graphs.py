"""Keep a deep graph that Python has looked at from crashing when it is freed.

A C++ node that Python has seen is freed recursively by torch 2.13: some 40,000 levels exhaust the stack of the
main thread, 1,150 that of a small one. So once many nodes of a graph have been seen, every so often one of them is
given the list of those seen before it. When that node dies its list is emptied from the end, that is from the node
nearest to it, and each death finds its successor still held: no recursion deeper than one list.
"""

from __future__ import annotations

from typing import Any

FREE_DEPTH = 400
"""Seen nodes below which recursion is harmless on any stack that torch itself can run on."""

_KEY = "retrograd.seen_before"


class DeepGraphGuard:
    """Counts the nodes that were seen in one forward, and strings lists through graphs that become deep.

    Attributes:
        count: nodes seen since the graph was begun. Where nodes come by the thousand, the caller may count by itself
            and call ``string`` only beyond ``FREE_DEPTH``.
    """

    __slots__ = ("_seen", "count")

    def __init__(self) -> None:
        self.count = 0
        self._seen: list[Any] = []

    def saw(self, node: Any) -> None:
        """Tell that Python has got hold of this node; nodes come in the order in which the forward makes them."""
        self.count += 1
        if self.count > FREE_DEPTH:
            self.string(node)

    def string(self, node: Any) -> None:
        """One node of a graph that is deep: every so often it is given the list of those seen before it."""
        self._seen.append(node)
        if len(self._seen) >= FREE_DEPTH:
            below, self._seen = self._seen[:-1], []
            node.metadata[_KEY] = below

    def restart(self) -> None:
        """Begin a new graph; what was gathered and not yet handed over is let go, nearest node first."""
        self.count = 0
        while self._seen:
            self._seen.pop()
