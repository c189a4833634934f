"""Modules whose rules are not asked since nobody calls them: their weights get gradients all the same."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdRef

from retrograd.core.amounts import list_names
from retrograd.core.hooks.compiled import find_compiled_wrappers, has_compiled_code
from retrograd.core.hooks.module import CallTap
from retrograd.core.hooks.names import NamedModule
from retrograd.core.notices import warn
from retrograd.rewriting.site_rewriter import SiteRewriters

_BY_NAME = "forward is called by name (`self.a.forward(x)`, not `self.a(x)`), or its weights are used without a call"
_BEFORE = "in code that was compiled before the rules were set: call torch.compiler.reset() first"


@dataclass(frozen=True, slots=True)
class _Watched:
    """A module whose calls have rules.

    Attributes:
        on_value: some of them act in the forward.
    """

    path: str
    rewriters: SiteRewriters
    parameters: Sequence[WeakIdRef]
    on_value: bool

    def was_used(self) -> bool:
        return any(_has_gradient(each) for each in self.parameters)


class UncalledModules:
    """Finds, in the first pass after a forward, modules that get gradients and were not called."""

    def __init__(self) -> None:
        self._modules: list[_Watched] = []
        self._internal: set[int] = set()
        self._taps: list[CallTap] = []
        self._empty: list[_Watched] | None = None
        self._is_done = False
        self.has_warned = False

    def watch(self, entries: Sequence[NamedModule]) -> None:
        """Watch what runs these modules in compiled code."""
        for entry in entries:
            kind = type(entry.module).__module__
            if kind.startswith("torch.nn.modules.") and not kind.endswith(".container"):
                self._internal.update(map(id, entry.module.children()))  # which torch's own uses as it likes
        watcher = weakref.proxy(self)
        for wrapper in find_compiled_wrappers([entry.module for entry in entries]):
            self._taps.append(CallTap(wrapper, watcher))

    def add(self, entry: NamedModule, rewriters: SiteRewriters, *, on_value: bool) -> None:
        """Watch a module whose calls have rules, in the forward too or only in the backward."""
        if id(entry.module) not in self._internal:
            parameters = [WeakIdRef(parameter) for _, parameter in entry.parameters]
            self._modules.append(_Watched(entry.path, rewriters, parameters, on_value))

    def remove(self) -> None:
        """Watch no more."""
        while self._taps:
            self._taps.pop().remove()

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A compiled model is called."""

    def after_call(self, module: nn.Module, output: Any) -> None:
        """A compiled model has been called; None if that raised."""
        asked = [each for each in self._modules if each.on_value]
        if output is not None and asked and not any(each.rewriters.was_reached for each in asked):
            self._warn(f"{_name(asked)}: the model runs {_BEFORE}.")

    def pass_begins(self) -> None:
        """A pass begins."""
        if not self._is_done and self._empty is None:
            self._empty = [each for each in self._modules if not (each.rewriters.was_reached or each.was_used())]

    def pass_ends(self, failed: bool) -> None:
        """It has ended."""
        empty, self._empty = self._empty, None
        if failed or self._is_done or empty is None:
            return
        self._is_done = True
        uncalled = [each for each in empty if each.was_used() and not each.rewriters.was_reached]
        if uncalled:
            reason = f"they run {_BEFORE}; or a {_BY_NAME}." if has_compiled_code() else f"a {_BY_NAME}."
            self._warn(
                f"{_name(uncalled)}: the weights there get gradients, and the modules are not called, so that no "
                f"hook runs: {reason}"
            )

    def warn_of_unreached(self, patterns: Iterable[str], *, was_run: bool) -> None:
        """Warn of patterns at which no rule has acted, unless that was said of their modules."""
        names = ", ".join(patterns)
        if not names or self.has_warned or not (was_run or has_compiled_code()):
            return
        reason = "these sites were never reached." if was_run else "no call of the model was seen."
        more = f"It may run {_BEFORE}. " if has_compiled_code() else ""
        self._warn(f"{names}: {reason} {more}No hook runs where a {_BY_NAME}.")

    def _warn(self, text: str) -> None:
        if not self.has_warned:
            self.has_warned = True
            warn(f"No rule has acted at {text}")


def _name(modules: Sequence[_Watched]) -> str:
    return list_names(list(dict.fromkeys(each.path for each in modules)))


def _has_gradient(find: WeakIdRef) -> bool:
    parameter = find()
    return parameter is not None and parameter.grad is not None
