"""The rules for the value and for the gradient of one site, at one call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from retrograd.core.errors import CannotRewriteError
from retrograd.core.hooks import in_graphs
from retrograd.core.hooks.engine import grad_enabled, uncompiled
from retrograd.core.hooks.gradients import ChangeGradient, branch, change_gradient
from retrograd.core.hooks.nested import Keys, flatten, is_among, replace_tensors
from retrograd.core.hooks.reach import FREE_DEPTH
from retrograd.core.hooks.saved import VersionCount
from retrograd.core.ranks.placements import PlainShare
from retrograd.core.ranks.processes import ask_rank
from retrograd.core.sites.pattern import Candidate
from retrograd.core.sites.site import Site
from retrograd.rewriting.assignments import Assignments
from retrograd.rewriting.chain import Beside, Noted, RuleChain
from retrograd.rewriting.clock import RewrittenCall, RuleClock, has_gradient
from retrograd.rewriting.plain_parts import refuse_part
from retrograd.rewriting.rules.rule import Rule


class WrittenViews:
    """Remembers views whose gradient has rules, for each thread those of the forward that is on its way.

    An in-place change of a view rebuilds the graph around its base, and the hooks on the view's gradient are reached
    no more. Rules that were lost in this way would be missed in silence, so :meth:`check` looks before each pass.
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[int, list[tuple[str, VersionCount]]]] = {}

    def watch(self, serial: int, site: str, view: Tensor) -> None:
        """Watch a view whose gradient has rules; views of an earlier ``serial`` are forgotten."""
        thread = threading.get_ident()
        found = self._watched.get(thread)
        if found is None or found[0] != serial:
            found = self._watched[thread] = serial, []
        found[1].append((site, VersionCount(view)))

    def check(self, *, forgets: bool) -> None:
        """Check all views before a backward pass, which may be that of another thread's forward.

        Args:
            forgets: what is written from now on does no harm; not so in a forward that runs a pass of its own.

        Raises:
            CannotRewriteError: if one of the views has been written into.
        """
        every = list(self._watched.values())
        for _, watched in every:
            for site, count in watched:
                if count.has_grown:
                    self._watched.clear()
                    raise CannotRewriteError(
                        f"{site} is a view, and has been written into after the forward: its rules would not be asked.",
                        repair="let the layer after it work out of place (inplace=False), or set the rules on its "
                        "output.",
                        reason="torch computes the gradient of the view's base instead, and that of the view never.",
                    )
        if forgets:
            self._watched.pop(threading.get_ident(), None)
            for thread in (
                self._watched.keys() - {each.ident for each in threading.enumerate()} if self._watched else ()
            ):
                self._watched.pop(thread, None)  # it has left its forward to this one, and ended


class RewriterFactory:
    """Makes the rules of sites, and has what all rewriters share.

    Args:
        assignments: which rules act where; None where they act on an optimizer.

    Attributes:
        clock: the time.
        views: views whose gradient has rules.
        is_active: whether the rules act.
    """

    def __init__(self, assignments: Assignments | None) -> None:
        self._assignments = assignments
        self.clock = RuleClock(needs_wholes=assignments is not None and assignments.needs_whole)
        self.views = WrittenViews()
        self.is_active = True

    def find_rules(self, candidate: Candidate) -> list[Rule]:
        """The rules for a site, in their order."""
        return self._assignments.find_rules(candidate) if self._assignments is not None else []

    def make_chain(self, rules: list[Rule], module: nn.Module | None, site: Site) -> RuleChain:
        """Make the chain of these rules at a site."""
        return RuleChain(rules, module, site, self.clock, ask_rank())

    def watch_view(self, site: str, tensor: Tensor) -> None:
        """Watch a tensor whose gradient would be lost if it were written into."""
        self.views.watch(self.clock.here.serial, site, tensor)


class GradientRewriter:
    """The rules for the gradient of one site at one call: the hook on it, where they are shown nothing beside it.

    Args:
        factory: has the clock, and says whether rules act.
        chain: the rules.
        call: the number of the call.

    Attributes:
        chain: the rules.
        training: the mode of the module, as it was in the last call whose gradient was hooked.
    """

    __slots__ = ("_call", "_clock", "_factory", "chain", "training")

    __name__ = "change_gradient"  # torch asks each hook for it, which costs more where there is none
    __torch_unserializable__ = True

    def __init__(self, factory: RewriterFactory, chain: RuleChain, call: int) -> None:
        self._factory = factory
        self._clock = factory.clock
        self.chain = chain
        self._call = call
        self.training = True

    @uncompiled
    def __call__(
        self,
        gradient: Tensor | None,
        beside: Beside | None = None,
        share: PlainShare | None = None,
        *,
        training: bool | None = None,
    ) -> Tensor | None:
        """What flows on instead of the gradient, beside which this is shown where a rule asks for it; None for that.

        A share says what a plain gradient is a part of, where a rule needs the whole.
        """
        chain = self.chain
        if gradient is None or not self._factory.is_active:
            return None
        training = self.training if training is None else training
        scale = self._clock.scale if self._clock.is_scaling else None
        if scale is not None:
            return chain.change_scaled(gradient, scale, self._call, training, beside, share)
        changed = chain.change(gradient, self._call, training, beside, share)
        return None if changed is gradient else changed


class _Paired:
    """The hook for a gradient whose rules ask for what belongs to it, or for the whole that it is a part of."""

    __slots__ = ("_beside", "_rewriter", "_share")

    __name__ = "change_gradient"  # torch asks each hook for it, which costs more where there is none
    __torch_unserializable__ = True

    def __init__(self, rewriter: GradientRewriter, beside: Beside, share: PlainShare | None) -> None:
        self._rewriter = rewriter
        self._beside = beside
        self._share = share

    @uncompiled
    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return self._rewriter(gradient, self._beside, self._share)


class SiteRewriter:
    """The rules of one site at one call.

    Args:
        factory: has the clock, and says whether rules act.
        value: the rules for the value, if any.
        gradient: those for the gradient, if any.
        call: the number of the call.

    Attributes:
        acts_on_value: there are rules for the value.
        value_needs_input: one of them asks for what the module was called with.
        gradient: lets those for the gradient act; None where there are none.
        needs_value, needs_input: what these are shown beside it.
    """

    __slots__ = (
        "_call", "_clock", "_factory", "_is_placed", "_share", "_value", "acts_on_value", "gradient", "name",
        "needs_input", "needs_value", "value_needs_input",
    )  # fmt: skip

    def __init__(
        self, factory: RewriterFactory, value: RuleChain | None, gradient: RuleChain | None, call: int
    ) -> None:
        self._factory = factory
        self._clock = factory.clock
        self._value = value
        self._call = call
        self._share: PlainShare | None = None
        self._is_placed = False
        self.acts_on_value = value is not None
        self.value_needs_input = value is not None and value.needs_input
        self.gradient = GradientRewriter(factory, gradient, call) if gradient is not None else None
        self.needs_value = gradient is not None and gradient.needs_value
        self.needs_input = gradient is not None and gradient.needs_input
        self.name = gradient.name if gradient is not None else value.name if value is not None else ""

    def change_value(
        self, tensor: Tensor, call: RewrittenCall | None, training: bool, *, again: bool, beside: Beside | None = None
    ) -> Tensor:
        """Let the rules change the value.

        Args:
            tensor: the value.
            call: the call that it is of; None for one that cannot be told.
            training: whether the module is in training mode.
            again: the value was there before, and is computed again.
            beside: what the rules are shown beside it.

        Raises:
            RuleError: if a rule breaks the contract, or raises.
            CannotRewriteError: where a rule with a memory would have to know which call is computed again.
        """
        chain = self._value
        if chain is None:
            return tensor
        share = self._find_share(tensor) if self._clock.parts.is_any and self._may_need_whole(tensor) else None
        if not again:
            if call is not None and chain.has_memory:
                call.remembered[chain] = chain.remember()
            return chain.change(tensor, self._call, training, beside, share)
        if call is None and chain.has_memory:
            raise CannotRewriteError(
                f"{chain.name} is computed again in a checkpointed part, and it is not known which call that is.",
                repair="give each call a module of its own, or use a rule without memory there.",
                reason="the rule must make of it what it made the first time, with what it remembered then.",
            )
        remembered = call.remembered.get(chain, ()) if call else ()
        return chain.change_again(tensor, self._call, training, remembered, beside, share)

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
        rewriter = self.gradient
        if rewriter is None or not tensor.requires_grad or not grad_enabled():
            return tensor
        rewriter.training = training
        share = None
        if rewriter.chain.needs_whole and self._clock.parts.is_any:  # what a rule has made of a part lies as that did
            share = self._share if self.acts_on_value and self._share is not None else self._find_share(tensor)
            if share is not None and not share.keeps_gradient:
                raise refuse_part(self.name)
        node = tensor.grad_fn
        if in_graphs.wing.is_loaded and not branches:
            self._check_whole(tensor)
        guard = self._clock.threads.own.guard
        if branches or node is None:
            if node is not None:
                guard.saw(node)
            tensor = branch(tensor)
            node = tensor.grad_fn
        if not is_private and tensor._is_view():
            self._factory.watch_view(self.name, tensor)
        hook: ChangeGradient = rewriter
        if self.needs_value or self.needs_input or share is not None:
            value = Noted(tensor, share) if self.needs_value else None
            hook = _Paired(rewriter, Beside(value, inputs or {}), share)
        change_gradient(tensor, hook)
        guard.count += 1
        if guard.count > FREE_DEPTH:
            guard.string(node)
        return tensor

    def _check_whole(self, tensor: Tensor) -> None:
        """Refuse a tensor of whose gradient compiled code keeps a part within."""
        part = in_graphs.wing.find_part(tensor)
        if part is in_graphs.Part.SOME:
            raise CannotRewriteError(
                f"{self.name} cannot be rewritten: compiled code returns this tensor, and computes with it.",
                repair="set the rule on the output of the module within that makes it, compile the parts instead, "
                "or call torch.compiler.disable() on the module that is compiled.",
                reason="what comes from inside the graph never reaches its boundary, where the rule would act.",
            )
        if part is in_graphs.Part.UNKNOWN:
            raise CannotRewriteError(
                f"{self.name} cannot be rewritten: the code that returns this tensor was compiled before the rules "
                "were set.",
                repair="call torch.compiler.reset() first: it is compiled once more, with the rules.",
                reason="it may compute with the tensor, too, and what comes from inside the graph never reaches its "
                "boundary, where the rule would act.",
            )

    def _may_need_whole(self, tensor: Tensor) -> bool:
        if self._value is not None and self._value.needs_whole:
            return True
        return self.gradient is not None and self.gradient.chain.needs_whole and tensor.requires_grad and grad_enabled()

    def _find_share(self, tensor: Tensor) -> PlainShare | None:
        found = self._clock.parts.find(tensor, self.name, self._share, is_placed=self._is_placed)
        if tensor.grad_fn is not None:
            self._share, self._is_placed = found, True
        return found


class SiteRewriters:
    """The rewriters of one module, or of one tensor that is watched by hand; each is made when it is first reached.

    Args:
        factory: makes the rules.
        module: the module, which is not held; None for a tensor that is watched by hand.
        path: its path.
        node: of a function that the module calls, the kind of node that it makes; None for what is no function.

    Attributes:
        path: the same.
    """

    MOST = 1000
    """Calls that have rewriters of their own; those of later ones are made anew each time."""

    def __init__(self, factory: RewriterFactory, module: nn.Module | None, path: str, node: str | None = None) -> None:
        self._factory = factory
        self._find_module = weakref.ref(module) if module is not None else None
        self.path = path
        self._node = node
        self._chains: dict[tuple[Site, tuple[int, ...]], RuleChain] = {}
        self._rewriters: dict[tuple[tuple[str, ...], int], SiteRewriter | None] = {}

    @property
    def was_reached(self) -> bool:
        """True once the module has been called, by code that asks its rules."""
        return bool(self._rewriters)

    @property
    def module(self) -> nn.Module | None:
        """The module, while it lives."""
        return self._find_module() if self._find_module is not None else None

    def find(self, keys: tuple[str, ...], call: int) -> SiteRewriter | None:
        """The rewriter of some keys at a call; None where no rule acts."""
        found = self._rewriters.get((keys, call), self)
        if not isinstance(found, SiteRewriters):
            return found
        site = Site(self.path, keys, call)
        value, gradient = self._chain(site), self._chain(site.grad)
        rewriter = (
            SiteRewriter(self._factory, value, gradient, call) if value is not None or gradient is not None else None
        )
        if call <= self.MOST:
            self._rewriters[keys, call] = rewriter
        return rewriter

    def rewrite(
        self,
        value: Any,
        keys: Keys,
        call: RewrittenCall | None,
        training: bool,
        *,
        again: bool,
        given: Any = (),
        inputs: Mapping[str, Noted] | None = None,
        beside: Beside | None = None,
    ) -> Any:
        """Let the rules act on all tensors in a value, and on their gradients; returns what takes its place.

        Args:
            value: a tensor, or a nest of them.
            keys: the slot that it is of.
            call: the call that it is of; None for one that cannot be told.
            training: whether the module is in training mode.
            again: the value was there before, and is computed again.
            given: what the module was called with: a tensor that is passed through has other uses.
            inputs: what went into the call, where a rule asks for that.
            beside: the same, for rules on values.
        """
        is_reached = has_gradient(call, again=again)
        changed: dict[Keys, Tensor] = {}
        for found, tensor in flatten(value, keys):
            rewriter = self.find(found, call.number if call is not None else 1)
            if rewriter is None:
                continue
            new = rewriter.change_value(tensor, call, training, again=again, beside=beside)
            if is_reached:
                new = rewriter.watch(new, training, branches=new is tensor and is_among(tensor, given), inputs=inputs)
            if new is not tensor:
                changed[found] = new
        return replace_tensors(value, keys, changed) if changed else value

    def _chain(self, site: Site) -> RuleChain | None:
        module = self.module
        rules = self._factory.find_rules(Candidate(site, module, self._node))
        if not rules:
            return None
        key = (site.first_call, tuple(id(rule) for rule in rules))
        if key not in self._chains:
            self._chains[key] = self._factory.make_chain(rules, module, site.first_call)
        return self._chains[key]
