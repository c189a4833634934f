"""Rules on tensors that are watched by hand."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from retrograd.hooks.engine import current_graph_task
from retrograd.hooks.nested import Keys, flatten, replace_tensors
from retrograd.rewriting.calls import CallNumbers
from retrograd.rewriting.site_rewriter import RewriteHost, SiteRewriters
from retrograd.sites.site import WATCH


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
