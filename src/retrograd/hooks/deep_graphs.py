"""Keep a deep graph that Python has looked at from crashing when it is freed.

A C++ node that Python has seen is freed recursively by torch 2.13: some 40,000 levels exhaust the stack of the
main thread, 2,400 that of one with 512 KiB. So once many nodes of a graph have been seen, every so often the newest of
them are given the list of those seen before. A list is emptied from its end when its last holder has died, that is
from the node nearest to it, and each death finds its successor still held; and CPython takes apart lists within lists
without recursion.

Whatever holds a node of a list must be newer than it, or it would hold itself. Sequence numbers tell.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import methodcaller
from typing import Any

from retrograd.hooks.nested import flatten

FREE_DEPTH = 400
"""Seen nodes below which recursion is harmless on any stack that torch itself can run on."""

HOLDERS = 8
"""Nodes that are given a list: several, for one whose result is used by nobody dies at once."""

_FEWEST = 50
"""Gathered nodes from which on it is worth to hand them over before their time."""

_KEY = "retrograd.seen_before"

_number = methodcaller("_sequence_nr")


def is_strung(node: Any) -> bool:
    """Whether a node holds a list of nodes seen before it."""
    return _KEY in node.metadata


def string_lists(nodes: Sequence[Any]) -> None:
    """String lists through a whole graph.

    Args:
        nodes: all that are no leaves, each behind all that it leads to.
    """
    for end in range(FREE_DEPTH, len(nodes) + FREE_DEPTH, FREE_DEPTH):
        part = nodes[end - FREE_DEPTH : end]
        middle = len(part) - min(HOLDERS, len(part) // 2)
        below = part[:middle]
        if end > FREE_DEPTH:
            below = [*nodes[end - FREE_DEPTH - HOLDERS : end - FREE_DEPTH], *below]
        for holder in part[middle:]:
            holder.metadata.setdefault(_KEY, []).append(below)


class DeepGraphGuard:
    """Counts the nodes that were seen in one forward, and strings lists through graphs that become deep.

    Attributes:
        count: nodes seen since the graph was begun. Where nodes come by the thousand, the caller may count by itself
            and call ``string`` only beyond ``FREE_DEPTH``.
    """

    __slots__ = ("_seen", "_thread", "count")

    def __init__(self) -> None:
        self.count = 0
        self._seen: list[Any] = []
        self._thread = 0

    def saw(self, node: Any) -> None:
        """Tell that Python has got hold of this node, as often as you like, and in any order."""
        self.count += 1
        if self.count > FREE_DEPTH:
            self.string(node)

    def string(self, node: Any) -> None:
        """One node of a graph that is deep."""
        thread = threading.get_ident()
        if thread != self._thread:  # its numbers do not compare with those of another thread
            self._let_go()
            self._thread = thread
        self._seen.append(node)
        if len(self._seen) >= FREE_DEPTH:
            self._hand_over()

    def begin_forward(self, arguments: Any) -> None:
        """A model is called with these: does it go on with the graph that was seen before?"""
        if self.count > FREE_DEPTH and not any(
            tensor.requires_grad and not tensor.is_leaf for _, tensor in flatten(arguments, ())
        ):
            self.part()

    def pause(self) -> None:
        """A forward is over, and the next one may go on with its graph, or the graph may be dropped before it."""
        if len(self._seen) >= _FEWEST:
            self.part()

    def part(self) -> None:
        """A forward begins that does not go on with what was seen before, as far as one can tell."""
        if self._seen:
            self._hand_over()
            self._let_go()

    def restart(self) -> None:
        """Begin a new graph."""
        self.count = 0
        self._let_go()

    def _hand_over(self) -> None:
        nodes = list(dict.fromkeys(sorted(self._seen, key=_number)))
        middle = len(nodes) - min(HOLDERS, len(nodes) // 2)
        below, self._seen = nodes[:middle], nodes[middle:]
        for holder in self._seen:
            holder.metadata.setdefault(_KEY, []).append(below)

    def _let_go(self) -> None:
        while self._seen:  # nearest node first
            self._seen.pop()
