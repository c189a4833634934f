"""Rules on what a module returns, and on its gradient.

``rewrite_output`` runs at every call of every module that has a rule, so what nearly every call is like (one tensor,
with grad, rules for its gradient alone) is written out in it: a further Python call would be a tenth of its cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from retrograd.hooks.engine import current_graph_task, grad_enabled
from retrograd.hooks.nested import Keys
from retrograd.rewriting.chain import Noted
from retrograd.rewriting.clock import CallNumbers
from retrograd.rewriting.input_rewriter import InputRewriter
from retrograd.rewriting.site_rewriter import RewriterFactory, SiteRewriter, SiteRewriters, is_among
from retrograd.sites.site import WATCH

_OUTPUT: Keys = ("output",)


class OutputRewriter:
    """Lets rules act on the results of one module.

    Args:
        factory: makes the rewriters, and has the clock.
        module: the module.
        path: its path.
        inputs: notes what goes into the module, where a rule asks for that.
    """

    def __init__(
        self, factory: RewriterFactory, module: nn.Module, path: str, inputs: InputRewriter | None = None
    ) -> None:
        self._factory = factory
        self._clock = factory.clock
        self._rewriters = SiteRewriters(factory, module, path)
        self._calls = CallNumbers(factory.clock)
        self._plain: dict[int, SiteRewriter | None] = {}
        self._inputs = inputs

    def rewrite_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The forward hook: what is returned instead."""
        if not self._factory.is_active:
            return output
        inputs = self._inputs.take_inputs() if self._inputs is not None else None
        if self._clock.is_outside:
            self._clock.part_begins(module, args, kwargs)
        calls = self._calls
        if type(output) is not Tensor or not grad_enabled() or current_graph_task() != -1:
            return self._rewrite(module, args, kwargs, output, inputs)
        number = calls.count_on()
        rewriter = self._plain[number] if number in self._plain else self._find_plain(number)
        if rewriter is None:
            return output
        new = output
        if rewriter.acts_on_value:
            new = rewriter.change_value(output, calls.note(number), module.training, again=False)
        if kwargs or any([new is each or type(each) is not Tensor for each in args]):  # noqa: C419  # the quicker
            return rewriter.watch(new, module.training, branches=is_among(new, (args, kwargs)), inputs=inputs)
        return rewriter.watch(new, module.training, inputs=inputs)

    def _find_plain(self, number: int) -> SiteRewriter | None:
        rewriter = self._rewriters.find(_OUTPUT, number)
        if number <= SiteRewriters.MOST:
            self._plain[number] = rewriter
        return rewriter

    def _rewrite(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        inputs: Mapping[str, Noted] | None,
    ) -> Any:
        """The same for all kinds of results, without grad, and where they are computed again."""
        again = current_graph_task() != -1
        call = self._calls.find_again() if again else self._calls.begin()
        return self._rewriters.rewrite(
            output, _OUTPUT, call, module.training, again=again, given=(args, kwargs), inputs=inputs
        )


class WatchedRewriter:
    """Lets rules act on what is handed to ``rg.watch``.

    Args:
        factory: makes the rewriters, and has the clock.
    """

    def __init__(self, factory: RewriterFactory) -> None:
        self._factory = factory
        self._watched: dict[str, tuple[SiteRewriters, CallNumbers]] = {}

    def rewrite_watched(self, name: str, value: Any) -> Any:
        """Let the rules change a tensor, or a nest of them; returns what takes its place."""
        if not self._factory.is_active:
            return value
        if name not in self._watched:
            self._watched[name] = SiteRewriters(self._factory, None, WATCH + name), CallNumbers(self._factory.clock)
        rewriters, calls = self._watched[name]
        again = current_graph_task() != -1
        call = calls.find_again() if again else calls.begin()
        return rewriters.rewrite(value, (), call, True, again=again)
