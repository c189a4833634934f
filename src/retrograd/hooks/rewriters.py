"""Who has rules for gradients, to be asked what they would make of one; and who is told of what rules change."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from retrograd.hooks.listeners import Listeners
from retrograd.sites.site import Site


class Rewriter(Protocol):
    """Whoever rewrites gradients while models train."""

    def try_rules(self, module: nn.Module, site: Site, gradient: Tensor) -> Tensor:
        """Try the rules for a site on a gradient; they learn nothing by it, and tell nobody.

        Args:
            module: the module that has the site.
            site: the site, a gradient's.
            gradient: of the site's shape, in float64 where the model is in float32.

        Returns:
            the gradient that would flow on; the very same tensor where no rule changes it.
        """


gradient_rewriters = Listeners[Rewriter]()
"""Who rewrites gradients now."""


def try_rules(module: nn.Module, site: Site, gradient: Tensor) -> Tensor:
    """Try all rules on a gradient, those set first first; returns the same tensor where there are none."""
    for rewriter in gradient_rewriters:
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
