"""The rules of one site, one after the other, held to what a rule may do, and what they are shown beside a gradient."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from retrograd.core.errors import CannotRewriteError, RuleError
from retrograd.core.hooks.checkpoints import EnoughComputed
from retrograd.core.hooks.rewriters import intervention_listeners, tell_intervention
from retrograd.core.hooks.saved import version_of
from retrograd.core.ranks.placements import PlainShare, is_sharded, local_part
from retrograd.core.sites.site import Site
from retrograd.rewriting.clock import RuleClock
from retrograd.rewriting.rules.rule import Change, PlainRule, Rule
from retrograd.rewriting.spread import act, needs_whole, show, spread, whole_inputs

NOTHING: Mapping[str, Tensor] = {}


class Noted:
    """A tensor as it was when it was seen; it shares the memory, and not the graph.

    Args:
        tensor: the tensor.
        share: what it is a part of, if rules are to be shown more than that.
    """

    __slots__ = ("_share", "_tensor", "_version")

    def __init__(self, tensor: Tensor, share: PlainShare | None = None) -> None:
        self._share = share
        self._tensor = tensor.detach()  # the tensor itself holds its node, and the node the hook that holds this
        self._version = version_of(tensor)

    def read(self, what: str, site: str, given: Tensor | None = None) -> Tensor:
        """The tensor.

        Args:
            what: what it is, as an error says it.
            site: who asks.
            given: the tensor itself, to be returned with its graph.

        Raises:
            CannotRewriteError: it has been overwritten since.
        """
        if version_of(self._tensor) != self._version:
            raise CannotRewriteError(
                f"A rule at {site} asks for {what}, and that has been overwritten in place.",
                repair="make the layer that writes into it work out of place (inplace=False).",
                reason="the rule would see what that layer has made of it.",
            )
        tensor = self._tensor if given is None else given
        return tensor if self._share is None else self._share.join(tensor)


class Beside:
    """Tensors that rules are shown beside a gradient, or beside the value of an output.

    Args:
        value: the activation, or parameter, that it is the gradient of; None where no rule asks.
        inputs: what the module was called with, by argument.
        given: the same tensors with their graph, for a rule on the output.
    """

    __slots__ = ("_given", "_inputs", "_value")

    def __init__(self, value: Noted | None, inputs: Mapping[str, Noted], given: Mapping[str, Tensor] = NOTHING) -> None:
        self._value = value
        self._inputs = inputs
        self._given = given

    def read_value(self, site: str) -> Tensor | None:
        """The value, as it was."""
        return None if self._value is None else self._value.read("the activation", site)

    def read_inputs(self, site: str) -> Mapping[str, Tensor]:
        """The inputs, as they were when the module was called."""
        return {
            name: noted.read(f"the input {name!r}", site, self._given.get(name)) for name, noted in self._inputs.items()
        }


Snapshot = Mapping[str, Any]
"""What one rule remembers of a site."""


class RuleChain:
    """The rules of one site, in their order.

    Args:
        rules: the rules.
        module: the module that has the site, which is not held; None for tensors that are watched by hand.
        site: the site, without the number of a call.
        clock: says what step it is.
        rank: of this process.

    Attributes:
        needs_value: whether one of the rules asks for the activation that belongs to a gradient.
        needs_input: whether one of them asks for what went into that call of the module.
        needs_whole: whether one of them needs more of a tensor than the part that this process has.
        steps: each rule, what it knows of the site, and what to call.
        lock: held while they act.

    Raises:
        CannotRewriteError: for a rule that asks for an input where there is none.
    """

    __slots__ = ("_clock", "_find_module", "lock", "name", "needs_input", "needs_value", "needs_whole", "site", "steps")

    def __init__(
        self, rules: Sequence[Rule], module: nn.Module | None, site: Site, clock: RuleClock, rank: int
    ) -> None:
        self._clock = clock
        self.lock = threading.RLock()  # several threads may train one model, and a rule may run a pass of its own
        self._find_module = weakref.ref(module) if module is not None else None
        self.site = site
        self.name = str(site)
        self.needs_value = any(rule.needs_value for rule in rules)
        self.needs_input = any(rule.needs_input for rule in rules)
        self.needs_whole = any(needs_whole(rule) for rule in rules)
        kinds = ("output",) if site.quantity == "value" else ("output", "input")
        if self.needs_input and site.kind not in kinds:
            raise CannotRewriteError(
                f"A rule at {self.name} asks for the input of a call, and there is none.",
                repair="set it on a module's output, 'fc:output', or on the gradient of its output or input, "
                "'fc:output.grad'.",
                reason="a parameter belongs to all calls, a watched tensor to no module, and the value of an input is "
                "an input itself.",
            )
        self.steps = [(rule, rule.state_at(self.name), _plain(rule)) for rule in rules]
        for _, state, _ in self.steps:
            state.rank = rank

    def change(
        self,
        value: Tensor,
        call: int,
        training: bool,
        beside: Beside | None = None,
        share: PlainShare | None = None,
        *,
        tells: bool = True,
    ) -> Tensor:
        """Let the rules change a value; returns the very same object if they leave it alone.

        Args:
            value: an activation, a parameter or a gradient.
            call: which call of the module it is of.
            training: whether the module is in training mode.
            beside: what the rules are shown beside it.
            share: what a plain value is a part of, where a rule needs the whole.
            tells: whether those are told who listen for changes.

        Raises:
            RuleError: if one of them breaks the contract, or raises.
        """
        if share is not None:
            joined = share.join(value)
            spread_out = self.change(joined, call, training, beside, tells=tells)
            return value if spread_out is joined else local_part(spread_out)
        with self.lock:
            for rule, state, ask in self.steps:
                state.step, state.call, state.training = self._clock.step, call, training
                if beside is not None:
                    state.value = beside.read_value(self.name)
                    state.inputs = whole_inputs(beside.read_inputs(self.name))
                is_spread = type(value) is not Tensor and is_sharded(value)
                shown = show(rule, value, state) if is_spread else value
                try:
                    version = shown._version
                except RuntimeError:  # made in inference mode, it counts none
                    version = None
                try:
                    changed = act(rule, value, shown, state) if is_spread else ask(value, state)
                except Exception as error:
                    self._explain(rule, error)
                finally:
                    if beside is not None:  # the memory outlives the graph, and these must not
                        state.value, state.inputs = None, NOTHING
                self._check(rule, shown, version, changed)
                if changed is None or changed is shown:
                    continue
                if tells and intervention_listeners.all:
                    module = self._find_module() if self._find_module is not None else None
                    tell_intervention(module, replace(self.site, call=call), rule.name, shown, changed)
                value = spread(rule, value, changed) if is_spread else changed
            return value

    def change_scaled(
        self,
        gradient: Tensor,
        scale: Tensor,
        call: int,
        training: bool,
        beside: Beside | None,
        share: PlainShare | None = None,
    ) -> Tensor | None:
        """Let the rules change a gradient that is multiplied by a loss scale; they see it without.

        Returns:
            the changed gradient, multiplied as before; None if the rules leave it alone.
        """
        scale = scale.to(gradient.device, non_blocking=True)
        wide = gradient.float() if gradient.dtype is torch.float16 else gradient  # unscaled it is too small for half
        unscaled = wide / scale
        changed = self.change(unscaled, call, training, beside, share)
        return None if changed is unscaled else (changed * scale).to(gradient.dtype)

    def change_again(
        self,
        value: Tensor,
        call: int,
        training: bool,
        remembered: Sequence[Snapshot],
        beside: Beside | None = None,
        share: PlainShare | None = None,
    ) -> Tensor:
        """Do again what the rules did to a value that is computed again, with what they remembered then."""
        with self.lock:
            now = self.remember()
            try:
                self._recall(remembered)
                return self.change(value, call, training, beside, share, tells=False)
            finally:
                self._recall(now)

    @property
    def has_memory(self) -> bool:
        """True if a rule has remembered anything of the site so far."""
        return any(state.snapshot() for _, state, _ in self.steps)

    def remember(self) -> list[Snapshot]:
        """Copy what the rules remember of the site by now, for :meth:`change_again`."""
        with self.lock:
            return [state.snapshot() for _, state, _ in self.steps]

    def _recall(self, remembered: Sequence[Snapshot]) -> None:
        for index, (_, state, _) in enumerate(self.steps):
            state.restore(remembered[index] if remembered else {})

    def _explain(self, rule: Rule, error: Exception) -> NoReturn:
        """Raise what an error of a rule is to the program."""
        if isinstance(error, EnoughComputed):
            raise error
        if isinstance(error, RuleError):  # one mistake, one repair
            problem = f"{error.problem.removesuffix('.')}, at {self.name}."
            ours = RuleError(problem, repair=error.repair, reason=error.reason)
            raise ours.with_traceback(error.__traceback__) from error.__cause__
        raise RuleError(
            f"The rule {rule.name} has raised {type(error).__name__} at {self.name}: {error}",
            repair="fix the rule; the traceback above shows where.",
            reason="going on without it would train something else than was asked for.",
        ) from error

    def _check(self, rule: Rule, shown: Tensor, version: int | None, changed: object) -> None:
        """Refuse what a rule may not do: write into what it is shown, or return what cannot take its place.

        Raises:
            RuleError: it has.
        """
        if version is not None and shown._version != version:
            raise RuleError(
                f"The rule {rule.name} has written into its argument at {self.name}.",
                repair="return a new tensor: `value * 0.5`, not `value.mul_(0.5)`.",
                reason="others read the same memory: another branch of the backward pass, or the optimizer.",
            )
        if changed is None or changed is shown:
            return
        if not isinstance(changed, Tensor):
            raise RuleError(
                f"The rule {rule.name} has returned {type(changed).__name__} at {self.name}.",
                repair="return a tensor, or None to leave the value alone.",
            )
        if changed.shape != shown.shape or changed.dtype is not shown.dtype or changed.device != shown.device:
            raise RuleError(
                f"The rule {rule.name} has returned {_describe(changed)} for {_describe(shown)} at {self.name}.",
                repair="return a tensor of the same shape, dtype and device.",
                reason="what follows was computed for that shape, dtype and device.",
            )


def _plain(rule: Rule) -> Change:
    """What to call: of a function that was made a rule, the function itself."""
    return rule.change if type(rule) is PlainRule else rule


def _describe(tensor: Tensor) -> str:
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)} on {tensor.device}"
