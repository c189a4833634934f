"""Calls of modules inside compiled code, with the same numbers and the same rules as those in eager code."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from retrograd.core.errors import CannotRewriteError
from retrograd.core.hooks.engine import is_in_backward
from retrograd.core.hooks.nested import Keys
from retrograd.rewriting.chain import Beside, Noted
from retrograd.rewriting.clock import CallNumbers, RewrittenCall
from retrograd.rewriting.site_rewriter import RewriterFactory, SiteRewriter, SiteRewriters


class RewrittenCompiledCall:
    """One call of a module inside compiled code.

    Args:
        rewriters: those of the module.
        call: its number; None for one that is computed again and cannot be told.
        training: the module is in training mode.
        again: it is computed again in a checkpointed part.
    """

    __slots__ = ("_again", "_call", "_rewriters", "_training")

    def __init__(self, rewriters: SiteRewriters, call: RewrittenCall | None, training: bool, again: bool) -> None:
        self._rewriters = rewriters
        self._call = call
        self._training = training
        self._again = again

    def change_value(self, keys: Keys, value: Tensor) -> Tensor:
        """What the rules make of a value; the very same object if they leave it alone."""
        rewriter = self._find(keys)
        if rewriter is None:
            return value
        if rewriter.value_needs_input:
            raise CannotRewriteError(
                f"A rule at {rewriter.name} asks for the input of its module, which runs inside compiled code.",
                repair="call torch.compiler.disable() on that module, or run the model without torch.compile.",
                reason="what compiled code shows a rule has no graph, so that no gradient would reach the input.",
            )
        return rewriter.change_value(value, self._call, self._training, again=self._again)

    def change_gradient(
        self, keys: Keys, gradient: Tensor, value: Tensor | None, inputs: Mapping[Keys, Tensor]
    ) -> Tensor:
        """What the rules make of a gradient; the very same object if they leave it alone."""
        rewriter = self._find(keys)
        if rewriter is None or rewriter.gradient is None:
            return gradient
        beside = None
        if rewriter.needs_value or rewriter.needs_input:
            noted = {".".join(each): Noted(tensor) for each, tensor in inputs.items()} if rewriter.needs_input else {}
            beside = Beside(Noted(value) if value is not None and rewriter.needs_value else None, noted)
        changed = rewriter.gradient(gradient, beside, training=self._training)
        return gradient if changed is None else changed

    def _find(self, keys: Keys) -> SiteRewriter | None:
        return self._rewriters.find(keys, self._call.number if self._call is not None else 1)


def begin_compiled_call(
    factory: RewriterFactory, rewriters: SiteRewriters, calls: CallNumbers, *, trains: bool, training: bool
) -> RewrittenCompiledCall | None:
    """Begin a call of a module, whether or not anything saw the call of its model begin.

    Args:
        factory: has the clock, and says whether rules act.
        rewriters: those of the module.
        calls: its calls.
        trains: grad is enabled; compiled code itself runs without.
        training: the module is in training mode.
    """
    if not factory.is_active:
        return None
    with torch.set_grad_enabled(trains):
        module = rewriters.module
        if factory.clock.here.depth == 0 and module is not None:
            factory.clock.part_begins(module, (), {})
        again = is_in_backward()
        return RewrittenCompiledCall(rewriters, calls.find_again() if again else calls.begin(), training, again)
