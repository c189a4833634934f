"""Rewriters, asked for what they make of a gradient or of a watched tensor, and listeners to what rules change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from retrograd.hooks.engine import compiles_frames, uncompiled
from retrograd.hooks.gradients import ChangeGradient
from retrograd.hooks.listeners import Listeners
from retrograd.hooks.native import rules
from retrograd.hooks.nested import Keys
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
        """Tell whether its rules may act at what is watched under this name, a tensor at each of these places."""

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
"""Listeners, asked for before anything is told, for telling has a price."""


def tell_intervention(module: nn.Module | None, site: Site, rule: str, before: Tensor, after: Tensor) -> None:
    """Tell all who listen."""
    for listener in intervention_listeners:
        listener.intervened(module, site, rule, before, after)


class HookedRules(Protocol):
    """What a hook on a gradient has to know of the rules that act on it.

    Attributes:
        steps: each rule, what it is told, and what to call.
        lock: held while they act.
    """

    steps: list[tuple[Any, Any, Callable[..., Tensor | None]]]
    lock: threading.RLock

    def explain(self, rule: Any, error: BaseException) -> None:
        """Raise what an error of a rule is to the program."""

    def check(self, rule: Any, shown: Tensor, version: int, changed: object) -> None:
        """Refuse what a rule has returned for a tensor that was of this version, unless it may."""


def hook_of(change: ChangeGradient, chain: HookedRules, factory: Any, clock: Any, call: int) -> ChangeGradient:
    """What torch is to call for a gradient: ``change``, or the same without a Python frame where nothing is special.

    Args:
        change: lets the rules act; its ``training`` is the mode of the module.
        chain: the rules.
        factory: its ``is_active`` says whether they act.
        clock: its ``step`` is what they are told, and its ``is_scaling`` whether a loss may be multiplied by a scale.
        call: the number of the call.
    """
    if rules is None:
        return change
    who = change, factory, clock, intervention_listeners, Tensor, compiles_frames
    hook: ChangeGradient = rules.GradientHook(
        *who, chain.steps, call, chain.lock.acquire, chain.lock.release, chain.explain, chain.check
    )
    return hook
