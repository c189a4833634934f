"""Rewriters, asked for what they make of a gradient or of a watched tensor, and listeners to what rules change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from retrograd.core.hooks.engine import uncompiled
from retrograd.core.hooks.listeners import Listeners
from retrograd.core.hooks.nested import Keys
from retrograd.core.sites.site import Site


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
"""All that rewrite gradients now."""


def try_rules(module: nn.Module, site: Site, gradient: Tensor) -> Tensor:
    """Try all rules on a gradient, those set first first; returns the same tensor where there are none."""
    for rewriter in gradient_rewriters:
        gradient = rewriter.try_rules(module, site, gradient)
    return gradient


class TensorRewriter(Protocol):
    """Rewrites tensors that are watched by hand.

    Attributes:
        everywhere: where its rules may act, as a text.
    """

    everywhere: str

    def may_rewrite(self, name: str, places: Sequence[Keys]) -> bool:
        """Return whether its rules may act at what is watched under this name, a tensor at each of these places."""

    def rewrite_watched(self, name: str, value: Any) -> Any:
        """Return the replacement of ``value``, a tensor or a nest of them."""


watched_rewriters = Listeners[TensorRewriter]()
"""All that are asked about watched tensors, in this order."""


@uncompiled
def rewrite_watched(name: str, value: Any) -> Any:
    """Have every rewriter in turn replace a tensor, or a nest of tensors, that is watched by hand."""
    for rewriter in watched_rewriters.all:
        value = rewriter.rewrite_watched(name, value)
    return value


class InterventionListener(Protocol):
    """Notified of each change that a rule makes, in the thread that makes it. Must not raise, nor wait for a device."""

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
"""Listeners, asked for before anything is told, for telling has a price."""


def tell_intervention(module: nn.Module | None, site: Site, rule: str, before: Tensor, after: Tensor) -> None:
    """Notify all listeners."""
    for listener in intervention_listeners:
        listener.intervened(module, site, rule, before, after)
