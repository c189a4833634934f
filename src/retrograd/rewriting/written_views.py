"""Views whose gradient has rules, and whether anybody has written into them since.

An in-place change of a view rebuilds the graph around its base, and the hooks on the view's gradient are reached no
more. Rules that were lost in this way would be missed in silence, so before each backward pass it is looked after.
"""

from __future__ import annotations

import threading

from torch import Tensor

from retrograd.errors import CannotRewriteError
from retrograd.hooks.input_gradient import VersionCount


class WrittenViews:
    """Remembers the views of the forwards that are on their way, for each thread by itself."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[int, list[tuple[str, VersionCount]]]] = {}

    def watch(self, serial: int, site: str, view: Tensor) -> None:
        """A view whose gradient has rules; what came before another ``serial`` is forgotten."""
        thread = threading.get_ident()
        found = self._watched.get(thread)
        if found is None or found[0] != serial:
            found = self._watched[thread] = serial, []
        found[1].append((site, VersionCount(view)))

    def check(self, *, forgets: bool) -> None:
        """A backward pass begins, which may be that of another thread's forward.

        Args:
            forgets: what is written from now on does no harm; not so in a forward that runs a pass of its own.

        Raises:
            CannotRewriteError: if one of the views has been written into.
        """
        every = list(self._watched.values())
        for _, watched in every:
            for site, count in watched:
                if count.has_grown:
                    self._watched.clear()
                    raise CannotRewriteError(
                        f"{site} is a view, and has been written into after the forward: its rules would not be asked.",
                        repair="let the layer behind it work out of place (inplace=False), or set the rules on its "
                        "output.",
                        reason="torch computes the gradient of the view's base instead, and that of the view never.",
                    )
        if forgets:
            self._watched.pop(threading.get_ident(), None)
            for thread in (
                self._watched.keys() - {each.ident for each in threading.enumerate()} if self._watched else ()
            ):
                self._watched.pop(thread, None)  # it has left its forward to this one, and ended
