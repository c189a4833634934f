"""Rules on what a module returns, and on its gradient.

``rewrite_output`` runs at every call of every module that has a rule, so what nearly every call is like (one tensor,
with grad, rules for its gradient alone) is written out in it: a further Python call would be a tenth of its cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from retrograd.hooks.engine import current_graph_task, grad_enabled
from retrograd.hooks.nested import Keys, flatten, replace_tensors
from retrograd.rewriting.chain import Noted
from retrograd.rewriting.clock import CallNumbers
from retrograd.rewriting.input_rewriter import InputRewriter
from retrograd.rewriting.site_rewriter import RewriteHost, SiteRewriter, SiteRewriters
from retrograd.sites.site import WATCH

_OUTPUT: Keys = ("output",)


class OutputRewriter:
    """Lets rules act on the results of one module.

    Args:
        host: the rewriting.
        module: the module.
        path: its path.
        inputs: notes what goes into the module, where a rule asks for that.
    """

    def __init__(self, host: RewriteHost, module: nn.Module, path: str, inputs: InputRewriter | None = None) -> None:
        self._host = host
        self._clock = host.clock
        self._rewriters = SiteRewriters(host, module, path)
        self._calls = CallNumbers(host.clock)
        self._plain: dict[int, SiteRewriter | None] = {}
        self._inputs = inputs

    def rewrite_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The forward hook: what is returned instead."""
        if not self._host.is_active:
            return output
        inputs = self._inputs.take_inputs() if self._inputs is not None else None
        if self._clock.is_outside:
            self._host.part_begins(module, args, kwargs)
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
            return rewriter.watch(new, module.training, branches=_is_among(new, args, kwargs), inputs=inputs)
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
        has_gradient = not again or call is None or not call.had_grad
        changed: dict[Keys, Tensor] = {}
        for keys, tensor in flatten(output, _OUTPUT):
            rewriter = self._rewriters.find(keys, call.number if call is not None else 1)
            if rewriter is None:
                continue
            new = rewriter.change_value(tensor, call, module.training, again=again)
            if has_gradient:
                branches = new is tensor and _is_among(tensor, args, kwargs)
                new = rewriter.watch(new, module.training, branches=branches, inputs=inputs)
            if new is not tensor:
                changed[keys] = new
        return replace_tensors(output, _OUTPUT, changed) if changed else output


def _is_among(tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(tensor is each for _, each in flatten((args, kwargs), ()))


class WatchedRewriter:
    """Lets rules act on what is handed to ``rg.watch``.

    Args:
        host: the rewriting.
    """

    def __init__(self, host: RewriteHost) -> None:
        self._host = host
        self._watched: dict[str, tuple[SiteRewriters, CallNumbers]] = {}

    def rewrite_watched(self, name: str, value: Any) -> Any:
        """What takes the place of a tensor, or of a nest of them."""
        if not self._host.is_active:
            return value
        if name not in self._watched:
            self._watched[name] = SiteRewriters(self._host, None, WATCH + name), CallNumbers(self._host.clock)
        rewriters, calls = self._watched[name]
        again = current_graph_task() != -1
        call = calls.find_again() if again else calls.begin()
        changed: dict[Keys, Tensor] = {}
        for keys, tensor in flatten(value, ()):
            rewriter = rewriters.find(keys, call.number if call is not None else 1)
            if rewriter is None:
                continue
            new = rewriter.change_value(tensor, call, True, again=again)
            if not again or call is None or not call.had_grad:
                new = rewriter.watch(new, True)
            if new is not tensor:
                changed[keys] = new
        return replace_tensors(value, (), changed) if changed else value
