"""What rules change is told here to whoever records it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from retrograd.hooks.listeners import Listeners
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


intervention_listeners = Listeners[InterventionListener]()
"""Those who listen. Asked before anything is told, for telling has a price."""


def tell_intervention(module: nn.Module | None, site: Site, rule: str, before: Tensor, after: Tensor) -> None:
    """Tell all who listen."""
    for listener in intervention_listeners:
        listener.intervened(module, site, rule, before, after)
