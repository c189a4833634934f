"""Who has rules for gradients, to be asked what they would make of one; and who is told of what rules change."""

from __future__ import annotations

import threading
from typing import Protocol

from torch import Tensor, nn

from retrograd.hooks.listeners import Listeners
from retrograd.sites.site import Site


class Rewriter(Protocol):
    """Whoever rewrites gradients while models train."""

    def try_rules(self, module: nn.Module, site: Site, gradient: Tensor) -> Tensor:
        """What the rules for a site would make of a gradient; they learn nothing by it, and tell nobody.

        Args:
            module: the module that has the site.
            site: the site, a gradient's.
            gradient: of the site's shape, in float64 where the model is in float32.

        Returns:
            what would flow on; the very same tensor where no rule changes it.
        """


rewriters: tuple[Rewriter, ...] = ()
"""Those who rewrite now."""

_lock = threading.Lock()


def announce_rewriter(rewriter: Rewriter) -> None:
    """From now on this one may be asked."""
    global rewriters
    with _lock:
        rewriters = (*rewriters, rewriter)


def withdraw_rewriter(rewriter: Rewriter) -> None:
    """From now on it may not."""
    global rewriters
    with _lock:
        rewriters = tuple(other for other in rewriters if other is not rewriter)


def try_rules(module: nn.Module, site: Site, gradient: Tensor) -> Tensor:
    """What all rules would make of a gradient, those set first first; the same tensor where there are none."""
    for rewriter in rewriters:
        gradient = rewriter.try_rules(module, site, gradient)
    return gradient


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
