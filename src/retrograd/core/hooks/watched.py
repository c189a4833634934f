"""Tensors that are watched by hand, inside compiled code.

Where torch.compile traces ``rg.watch``, the graph gets a tap, like those on modules; there is one for all names, and a
name is the first of the keys. Graphs are guarded by whether the tap is set: that is while somebody listens, and from
then on if it is part of a graph, which would be compiled anew without it.

Rules on such a tensor act between two graphs, which is told.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from retrograd.core.hooks import in_graphs
from retrograd.core.hooks.engine import break_graph, knows_at_once
from retrograd.core.hooks.in_graphs import tell_of_break
from retrograd.core.hooks.module import CompiledWatcher, Tap
from retrograd.core.hooks.nested import Keys, flatten
from retrograd.core.hooks.rewriters import watched_rewriters
from retrograd.core.sites.site import WATCH, check_watch_name


class _WatchedTap(Tap[CompiledWatcher]):
    """The tap on all tensors that are watched by hand.

    Attributes:
        is_set: graphs that are traced now get it.
    """

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        super().__init__()
        self.is_set = False

    def watch(self, watchers: tuple[CompiledWatcher, ...]) -> None:
        """Have these watchers instead."""
        super().watch(watchers)
        self.is_set = bool(watchers) or self.is_compiled


_tap = _WatchedTap()
_lock = threading.Lock()


def watch_by_hand(watcher: CompiledWatcher) -> None:
    """Notify ``watcher`` of tensors that compiled code watches by hand; the first of their keys is the name."""
    with _lock:
        _tap.watch((*_tap.watchers, watcher))
        in_graphs.first_graph.hold()


def unwatch_by_hand(watcher: CompiledWatcher) -> None:
    """Stop notifying it."""
    with _lock:
        left = tuple(other for other in _tap.watchers if other is not watcher)
        if len(left) < len(_tap.watchers):
            in_graphs.first_graph.release()
        _tap.watch(left)


def trace_watched(name: str, value: Any) -> None:
    """Put into the graph that is being traced that a tensor, or a nest of them, is watched; or break it for rules.

    Raises:
        SiteSyntaxError: for a name that cannot be one.
        GraphBreakError: if rules act there and the graph must be whole.
    """
    rewriters = watched_rewriters.all
    if rewriters:
        places = tuple([keys for keys, _ in flatten(value, ())])
        if _is_rewritten(name, places, *[rewriter.everywhere for rewriter in rewriters]):
            tell_of_break(WATCH + name)
            break_graph()
    if _tap.is_set:
        _check_name(name)
        in_graphs.wing.trace_tap(_tap.handle, value, (name,))


@knows_at_once
def _check_name(name: str) -> None:
    check_watch_name(name)


@knows_at_once
def _is_rewritten(name: str, places: Sequence[Keys], *everywhere: str) -> bool:
    """Return whether rules act at what is watched under this name. The graph is guarded by where all may act."""
    check_watch_name(name)
    return any(rewriter.may_rewrite(name, places) for rewriter in watched_rewriters)
