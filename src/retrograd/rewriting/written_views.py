"""Views whose gradient has rules, and whether anybody has written into them since.

An in-place change of a view rebuilds the graph around its base, and the hooks on the view's gradient are reached no
more. Rules that were lost in this way would be missed in silence, so before each backward pass it is looked after.
"""

from __future__ import annotations

from torch import Tensor

from retrograd.errors import CannotRewriteError


class WrittenViews:
    """Remembers the views of the forwards that are on their way."""

    def __init__(self) -> None:
        self._serial = -1
        self._watched: list[tuple[str, Tensor, int]] = []

    def watch(self, serial: int, site: str, view: Tensor) -> None:
        """A view whose gradient has rules; what came before another ``serial`` is forgotten."""
        if serial != self._serial:
            self._serial = serial
            self._watched = []
        self._watched.append((site, view.detach(), view._version))

    def check(self) -> None:
        """A backward pass begins.

        Raises:
            CannotRewriteError: if one of the views has been written into.
        """
        watched, self._watched = self._watched, []
        for site, view, version in watched:
            if view._version != version:
                raise CannotRewriteError(
                    f"{site} is a view, and has been written into after the forward: its rules would not be asked.",
                    repair="let the layer behind it work out of place (inplace=False), or set the rules on its output.",
                    reason="torch computes the gradient of the view's base instead, and that of the view never.",
                )
