"""The rules for the value and for the gradient of one site, at one call."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from retrograd.errors import CannotRewriteError
from retrograd.hooks.engine import grad_enabled, uncompiled
from retrograd.hooks.input_gradient import branch
from retrograd.hooks.reach import FREE_DEPTH
from retrograd.hooks.tensor import change_gradient
from retrograd.rewriting.chain import Beside, Chain, Noted
from retrograd.rewriting.clock import NumberedCall, RuleClock
from retrograd.rules.rule import Rule
from retrograd.sites.pattern import Candidate
from retrograd.sites.site import Site


class RewriteHost(Protocol):
    """A rewriting as the rewriters of its sites see it."""

    clock: RuleClock
    is_active: bool

    def find_rules(self, candidate: Candidate) -> list[Rule]:
        """The rules for a site, in their order."""

    def make_chain(self, rules: list[Rule], module: nn.Module | None, site: Site) -> Chain:
        """These rules at a site."""

    def part_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Told that a part of a model is called by itself."""

    def watch_view(self, site: str, tensor: Tensor) -> None:
        """Told of a tensor whose gradient would be lost if it were written into."""


class SiteRewriter:
    """The rules of one site at one call.

    Args:
        host: the rewriting.
        value: the rules for the value, if any.
        gradient: those for the gradient, if any.
        call: the number of the call.
    """

    __slots__ = (
        "_call", "_clock", "_gradient", "_host", "_training", "_value", "acts_on_gradient", "acts_on_value", "name",
        "needs_input", "needs_value",
    )  # fmt: skip

    def __init__(self, host: RewriteHost, value: Chain | None, gradient: Chain | None, call: int) -> None:
        self._host = host
        self._clock = host.clock
        self._value = value
        self._gradient = gradient
        self._call = call
        self._training = True
        self.acts_on_value = value is not None
        self.acts_on_gradient = gradient is not None
        self.needs_value = gradient is not None and gradient.needs_value
        self.needs_input = gradient is not None and gradient.needs_input
        self.name = gradient.name if gradient is not None else value.name if value is not None else ""

    def change_value(self, tensor: Tensor, call: NumberedCall | None, training: bool, *, again: bool) -> Tensor:
        """What the rules make of the value.

        Args:
            tensor: the value.
            call: the call that it is of; None for one that cannot be told.
            training: whether the module is in training mode.
            again: the value was there before, and is computed again.

        Raises:
            RuleError: if a rule breaks the contract, or raises.
            CannotRewriteError: where a rule with a memory would have to know which call is computed again.
        """
        self._training = training
        chain = self._value
        if chain is None:
            return tensor
        if not again:
            if call is not None and chain.has_memory:
                call.remembered[chain] = chain.remember()
            return chain.change(tensor, self._call, training)
        if call is None and chain.has_memory:
            raise CannotRewriteError(
                f"{chain.name} is computed again in a checkpointed part, and it cannot be told which of its calls.",
                repair="give each call a module of its own, or use a rule without memory there.",
                reason="the rule must make of it what it made the first time, with what it remembered then.",
            )
        return chain.change_again(tensor, self._call, training, call.remembered.get(chain, ()) if call else ())

    def watch(
        self,
        tensor: Tensor,
        training: bool,
        *,
        branches: bool = False,
        is_private: bool = False,
        inputs: Mapping[str, Noted] | None = None,
    ) -> Tensor:
        """Let the rules act on the gradient of a tensor; returns the tensor to go on with.

        Args:
            tensor: the tensor.
            training: whether the module is in training mode.
            branches: it has other uses, whose gradients are to be left alone.
            is_private: the caller looks after writes into it.
            inputs: what went into the call that it is of, where a rule asks for that.
        """
        if self._gradient is None or not tensor.requires_grad or not grad_enabled():
            return tensor
        self._training = training
        node = tensor.grad_fn
        guard = self._clock.guard
        if branches or node is None:
            if node is not None:
                guard.saw(node)
            tensor = branch(tensor)
            node = tensor.grad_fn
        if not is_private and tensor._is_view():
            self._host.watch_view(self.name, tensor)
        if self.needs_value or self.needs_input:
            value = Noted(tensor) if self.needs_value else None
            change_gradient(tensor, _Paired(self, Beside(value, inputs or {})))
        else:
            change_gradient(tensor, self.change_gradient)
        guard.count += 1
        if guard.count > FREE_DEPTH:
            guard.string(node)
        return tensor

    @uncompiled
    def change_gradient(self, gradient: Tensor | None, beside: Beside | None = None) -> Tensor | None:
        """The hook: what flows on instead of the gradient, beside which this is shown where a rule asks for it."""
        chain = self._gradient
        if gradient is None or chain is None or not self._host.is_active:
            return None
        scale = self._clock.scale
        if scale is not None:
            return chain.change_scaled(gradient, scale, self._call, self._training, beside)
        changed = chain.change(gradient, self._call, self._training, beside)
        return None if changed is gradient else changed

    change_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined]


class _Paired:
    """The hook for a gradient whose rules ask for what belongs to it."""

    __slots__ = ("_beside", "_rewriter")

    __torch_unserializable__ = True

    def __init__(self, rewriter: SiteRewriter, beside: Beside) -> None:
        self._rewriter = rewriter
        self._beside = beside

    @uncompiled
    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return self._rewriter.change_gradient(gradient, self._beside)


class SiteRewriters:
    """The rewriters of one module, or of one tensor that is watched by hand; each is made when it is first reached.

    Args:
        host: the rewriting.
        module: the module, which is not held; None for a tensor that is watched by hand.
        path: its path.
    """

    MOST = 1000
    """Calls that have rewriters of their own; those of later ones are made anew each time."""

    def __init__(self, host: RewriteHost, module: nn.Module | None, path: str) -> None:
        self._host = host
        self._find_module = weakref.ref(module) if module is not None else None
        self._path = path
        self._chains: dict[tuple[Site, tuple[int, ...]], Chain] = {}
        self._rewriters: dict[tuple[tuple[str, ...], int], SiteRewriter | None] = {}

    def find(self, keys: tuple[str, ...], call: int) -> SiteRewriter | None:
        """The rewriter of some keys at a call; None where no rule acts."""
        found = self._rewriters.get((keys, call), self)
        if not isinstance(found, SiteRewriters):
            return found
        site = Site(self._path, keys, call)
        value, gradient = self._chain(site), self._chain(site.grad)
        rewriter = (
            SiteRewriter(self._host, value, gradient, call) if value is not None or gradient is not None else None
        )
        if call <= self.MOST:
            self._rewriters[keys, call] = rewriter
        return rewriter

    def _chain(self, site: Site) -> Chain | None:
        module = self._find_module() if self._find_module is not None else None
        rules = self._host.find_rules(Candidate(site, module))
        if not rules:
            return None
        key = (site.first_call, tuple(id(rule) for rule in rules))
        if key not in self._chains:
            self._chains[key] = self._host.make_chain(rules, module, site.first_call)
        return self._chains[key]
