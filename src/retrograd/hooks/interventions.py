"""What rules change is told here to whoever records it."""

from __future__ import annotations

import threading
from typing import Protocol

from torch import Tensor, nn

from retrograd.sites.site import Site


class InterventionListener(Protocol):
    """Told of each change that a rule makes, in the thread that makes it. Must not raise, nor wait for a device."""

    def intervened(self, module: nn.Module | None, site: Site, rule: str, before: Tensor, after: Tensor) -> None:
        """A rule has put ``after`` in the place of ``before``.

        Args:
            module: the module that has the site; None for tensors that are watched by hand.
            site: the site, as those name it who set the rule.
            rule: the rule, in words.
            before: what it was given.
            after: what it returned.
        """


listeners: tuple[InterventionListener, ...] = ()
"""Those who listen. Asked before anything is told, for telling has a price."""

_lock = threading.Lock()


def listen_to_interventions(listener: InterventionListener) -> None:
    """Tell this listener of every change in the process."""
    global listeners
    with _lock:
        listeners = (*listeners, listener)


def unlisten_to_interventions(listener: InterventionListener) -> None:
    """Stop telling this listener."""
    global listeners
    with _lock:
        listeners = tuple(other for other in listeners if other is not listener)


def tell_intervention(module: nn.Module | None, site: Site, rule: str, before: Tensor, after: Tensor) -> None:
    """Tell all who listen."""
    for listener in listeners:
        listener.intervened(module, site, rule, before, after)
