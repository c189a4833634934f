"""Rules on all gradients of an optimizer together, right before its update: what each backward pass brought, as one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdRef

from retrograd.core.errors import CannotRewriteError
from retrograd.core.hooks.engine import uncompiled
from retrograd.core.hooks.gradients import after_accumulation, change_gradient, leave_gradient
from retrograd.core.hooks.optimizer import UpdateTap, held_by
from retrograd.core.hooks.rewriters import intervention_listeners, tell_intervention
from retrograd.core.ranks.norms import FlatGradients, scale_all
from retrograd.core.ranks.placements import is_flattened, is_sharded
from retrograd.core.ranks.processes import ask_rank, has_other_processes
from retrograd.core.ranks.sharded_gradient import ShardedGradient, ShardedParameters
from retrograd.core.sites.site import Site
from retrograd.rewriting.clock import RuleClock
from retrograd.rewriting.parameter_rewriter import check_pass
from retrograd.rewriting.rules.norm_rule import NormRule
from retrograd.rewriting.rules.pass_rule import PassRule
from retrograd.rewriting.rules.rule import Rule, SiteState


class PassGradients:
    """Keeps the gradients of passes apart that torch adds up.

    Args:
        clock: says which pass runs, and what its gradients are multiplied by.
    """

    def __init__(self, clock: RuleClock) -> None:
        self._clock = clock
        self._found: dict[int, dict[int, Tensor]] = {}
        self._collectors: dict[int, _Collector] = {}
        self._spread: dict[int, ShardedGradient] = {}

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Keep what comes to these parameters, too."""
        known = {*self._collectors, *self._spread}
        new = [each for each in parameters if each.requires_grad and id(each) not in known]
        spread = ShardedParameters() if any(map(is_sharded, new)) else None
        for parameter in new:
            if spread is not None and is_sharded(parameter):
                self._spread[id(parameter)] = spread.find_gradient(parameter)
            else:
                self._collectors[id(parameter)] = _Collector(parameter, self._found, self._clock)

    def begin(self, site: str) -> None:
        """Empty the ``.grad`` of sharded parameters: a pass begins.

        Args:
            site: where the rules act, as an error says it.

        Raises:
            CannotRewriteError: for a pass of which it cannot be told what it brings.
        """
        for gradient in self._spread.values():
            check_pass(gradient, site)
            gradient.put_aside()

    def settle(self, failed: bool) -> None:
        """Take what has been added when the pass is over and its gradients are averaged over processes."""
        for key, gradient in self._spread.items():
            brought = None if failed else gradient.read()
            if brought is not None:
                self._keep(key, brought, is_first=not gradient.has_earlier)
            gradient.put_back()
        if has_other_processes():
            for collector in self._collectors.values():
                collector.settle()

    def _keep(self, key: int, brought: Tensor, *, is_first: bool) -> None:
        for found in self._found.values() if is_first else ():  # with ``.grad`` they have been thrown away
            found.pop(key, None)
        scale = self._clock.scale
        number = self._clock.pass_number
        unscaled = brought.detach().clone() if scale is None else brought.detach() / scale.to(brought.device)
        self._found.setdefault(number, {})[key] = unscaled

    def take(self, parameters: Sequence[Tensor]) -> list[list[Tensor | None]]:
        """Take, for each pass, the gradients of these parameters without loss scale; nothing is kept after."""
        passes = [[found.get(id(each)) for each in parameters] for found in self._found.values() if found]
        self._found.clear()
        return passes

    def remove(self) -> None:
        """Take the hooks back, and forget everything."""
        while self._collectors:
            self._collectors.popitem()[1].remove()
        while self._spread:
            self._spread.popitem()[1].put_back()
        self._found.clear()


class _Collector:
    """Two hooks of one parameter: what arrives counts once it has been added to ``.grad``.

    What ``torch.autograd.grad`` asks for is not, and where there is no ``.grad`` before it, all that came until then
    has been thrown away with it.

    In one of several processes something else is added: DDP averages over all of them what is in ``.grad``, right after
    the hooks. What a pass has brought is then what ``.grad`` has grown by in it.
    """

    __slots__ = ("_arrived", "_before", "_clock", "_find", "_found", "_is_added", "_number", "_undo")

    __name__ = "collect_gradient"  # torch asks each hook for it, which costs more where there is none
    __torch_unserializable__ = True

    def __init__(self, parameter: Tensor, found: dict[int, dict[int, Tensor]], clock: RuleClock) -> None:
        self._find = WeakIdRef(parameter)  # which holds this
        self._found = found
        self._clock = clock
        self._arrived: Tensor | None = None
        self._before: Tensor | None = None
        self._is_added = False
        self._number = -1
        change_gradient(parameter, self)
        self._undo = after_accumulation(parameter, self.add)

    @uncompiled
    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if self._number != self._clock.pass_number:
            self._begin()
        scale = self._clock.scale
        self._arrived = gradient.detach().clone() if scale is None else gradient.detach() / scale.to(gradient.device)
        parameter = self._find()
        if parameter is not None and parameter.grad is None:
            for found in self._found.values():
                found.pop(id(parameter), None)

    @uncompiled
    def add(self, parameter: Tensor) -> None:
        """Count what has arrived once it has been added to ``.grad``."""
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            found = self._found.setdefault(self._number, {})
            earlier = found.get(id(parameter))
            found[id(parameter)] = arrived if earlier is None else earlier + arrived
            self._is_added = True

    add.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def _begin(self) -> None:
        parameter = self._find()
        held = parameter.grad if parameter is not None else None
        self._number = self._clock.pass_number
        self._before = held.detach().clone() if held is not None and has_other_processes() else None
        self._is_added = False

    def settle(self) -> None:
        """Take what ``.grad`` has grown by in the pass for what has arrived."""
        before, self._before = self._before, None
        parameter = self._find()
        held = parameter.grad if parameter is not None else None
        if self._is_added and held is not None:
            brought = held.detach().clone() if before is None else held.detach() - before
            scale = self._clock.scale
            self._found[self._number][id(parameter)] = brought if scale is None else brought / scale.to(brought.device)
        self._is_added = False

    def remove(self) -> None:
        """Take the hooks back."""
        parameter = self._find()
        if parameter is not None:
            leave_gradient(parameter, self)
        self._undo()


SITE = Site("optimizer", ("gradients",))
"""Where joint rules act, as events call it."""


class JointRewriter:
    """Lets rules act on the gradients of an optimizer as on one vector.

    Args:
        optimizer: the optimizer, which is not held.
        rules: rules of a norm, and rules that combine several passes.
        clock: the time.

    Raises:
        CannotRewriteError: for another kind of rule, or an optimizer that computes its gradients by itself.
    """

    def __init__(self, optimizer: Optimizer, rules: list[Rule], clock: RuleClock) -> None:
        for rule in rules:
            _check(optimizer, rule)
        self._clock = clock
        self._steps: list[tuple[Rule, SiteState]] = [(rule, rule.state_at(str(SITE))) for rule in rules]
        self._passes = passes = PassGradients(clock)
        self._find_optimizer = weakref.ref(optimizer, lambda _: passes.remove())
        self._withheld: list[tuple[Tensor, Tensor]] = []
        self._set_found_inf = False
        self._flat = FlatGradients()
        self._tap = UpdateTap(optimizer, self._before_update, self._after_update)
        clock.when_skipped = self._forget_passes
        self._collects = any(isinstance(rule, PassRule) for rule in rules)

    def attach(self) -> None:
        """Keep what the pass that begins brings to each parameter, where a rule asks for it."""
        if self._collects:
            self._passes.watch(self._parameters())

    def pass_begins(self) -> None:
        """Begin a pass.

        Raises:
            CannotRewriteError: for one of which it cannot be told what it brings to sharded parameters.
        """
        if self._collects:
            self._passes.begin(str(SITE))

    def pass_ends(self, failed: bool) -> None:
        """End the pass."""
        if self._collects:
            self._passes.settle(failed)

    def remove(self) -> None:
        """Take the hooks back."""
        self._tap.remove()
        self._passes.remove()
        self._after_update()

    def _forget_passes(self, optimizer: Optimizer) -> None:
        if optimizer is self._find_optimizer():
            self._passes.take(())

    def _parameters(self) -> list[Tensor]:
        optimizer = self._find_optimizer()
        return held_by(optimizer) if optimizer is not None else []

    def _before_update(self, times: int) -> None:
        if times > 1:
            raise CannotRewriteError(
                "The optimizer computes its gradients several times within one update.",
                repair="set the rule on the parameters: rg.rewrite(model, {'*:parameters.grad': …}).",
                reason="what the rules remember would count each of them as an update.",
            )
        self._after_update()  # an update that raised has run no hook at its end
        for rule, state in self._steps:
            state.step, state.rank = self._clock.step, ask_rank()
            if isinstance(rule, PassRule):
                self._combine(rule, state)
            elif isinstance(rule, NormRule):
                self._scale(rule, state)

    def _combine(self, rule: PassRule, state: SiteState) -> None:
        parameters = self._parameters()
        passes = self._passes.take(parameters)
        if not passes:
            return
        scale = getattr(self._find_optimizer(), "grad_scale", None)
        for parameter, gradient in zip(parameters, rule.combine(passes, state), strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad.copy_(gradient if scale is None else gradient * scale)

    def _scale(self, rule: NormRule, state: SiteState) -> None:
        parameters = self._parameters()
        norm = self._flat.measure_norm(parameters)
        if norm is None:
            return
        scale = getattr(self._find_optimizer(), "grad_scale", None)  # set while it unscales by itself
        if scale is not None:
            norm = norm / scale.to(norm.device)
        factor = rule.scale(norm, state)
        if intervention_listeners.all:
            tell_intervention(None, SITE, rule.name, norm, norm * factor)
        if rule.skips:
            self._skip(factor == 0)
        else:
            scale_all([each.grad for each in parameters if each.grad is not None], factor)

    def _skip(self, is_skipped: Tensor) -> None:
        """Drop the update where that is so, on the device itself if the optimizer can."""
        optimizer: Any = self._find_optimizer()
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            found = getattr(optimizer, "found_inf", None)
            flag = is_skipped.to(torch.float32)
            if found is None:
                self._set_found_inf = True
                optimizer.found_inf = flag
            else:
                optimizer.found_inf = torch.maximum(found, flag)
            return
        if is_skipped:  # waits for a device; optimizers leave parameters alone whose gradient is None
            self._withheld = [(each, each.grad) for each in self._parameters() if each.grad is not None]
            for parameter, _ in self._withheld:
                parameter.grad = None

    def _after_update(self) -> None:
        for parameter, gradient in self._withheld:
            parameter.grad = gradient
        self._withheld = []
        if self._set_found_inf:
            self._set_found_inf = False
            optimizer = self._find_optimizer()
            if optimizer is not None:
                del optimizer.found_inf  # type: ignore[attr-defined]


def _check(optimizer: Optimizer, rule: Rule) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CannotRewriteError(
            "The gradients of LBFGS cannot be rewritten together.",
            repair="set the rule on the parameters: rg.rewrite(model, {'*:parameters.grad': …}).",
            reason="it computes them several times within one update.",
        )
    if isinstance(rule, PassRule) and any(map(is_flattened, held_by(optimizer))):
        raise CannotRewriteError(
            f"{rule.name} cannot combine the passes of FullyShardedDataParallel.",
            repair="shard the model by torch.distributed.fsdp.fully_shard.",
            reason="each process has stretches of several gradients in one, and no hook shows what a pass brings.",
        )
    if not isinstance(rule, NormRule | PassRule):
        raise CannotRewriteError(
            f"{rule.name} does not act on all gradients together.",
            repair=f"set it on the parameters: rg.rewrite(model, {{'*:parameters.grad': {rule.name}}}).",
            reason="only a rule of the norm, or one that combines several passes, treats them as one vector.",
        )
