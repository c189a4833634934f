"""Rules on what a module is called with, on what it returns, and on the gradients of both.

A rule on the gradient of an argument acts on its gradient through this module alone. ``rewrite_output`` runs at every
call of every module that has a rule, so what nearly every call is like (one tensor, with grad, rules for its gradient
alone) is written out in it: a further Python call would be a tenth of its cost.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograd.core.errors import CannotRewriteError
from retrograd.core.hooks.calls import count_calls
from retrograd.core.hooks.engine import grad_enabled, is_in_backward, next_sequence_number
from retrograd.core.hooks.gradients import change_input_gradient
from retrograd.core.hooks.names import ArgumentNames
from retrograd.core.hooks.nested import Keys, flatten, is_among, replace_tensors
from retrograd.core.ranks.placements import PlainShare
from retrograd.core.sites.pattern import Candidate, describe_pattern
from retrograd.core.sites.site import WATCH, Site
from retrograd.rewriting.assignments import Assignments
from retrograd.rewriting.chain import Beside, Noted
from retrograd.rewriting.clock import CallNumbers, RewrittenCall, has_gradient
from retrograd.rewriting.site_rewriter import RewriterFactory, SiteRewriter, SiteRewriters

_INPUT: Keys = ("input",)
_OUTPUT: Keys = ("output",)


class _BranchedArgument:
    """An argument that was branched off for the module, so that its gradient through the module can be changed."""

    __slots__ = ("edge", "node", "number", "rewriter", "tensor", "version")

    def __init__(self, rewriter: SiteRewriter, tensor: Tensor, edge: GradientEdge, number: int) -> None:
        self.rewriter = rewriter
        self.tensor = tensor
        self.node = tensor.grad_fn
        self.edge = edge
        self.number = number
        self.version = tensor._version


class CallInProgress:
    """A call that has begun and not ended.

    Attributes:
        call: that call; None for one that cannot be told.
        again: it is computed again in a checkpointed part.
        has_overrides: values stand in for parameters.
        inputs: the arguments, where a rule asks for them.
        uses: arguments that were branched off.
    """

    __slots__ = ("again", "call", "has_overrides", "inputs", "uses")

    def __init__(self, call: RewrittenCall | None, *, again: bool) -> None:
        self.call = call
        self.again = again
        self.has_overrides = False
        self.inputs: dict[str, Noted] = {}
        self.uses: list[_BranchedArgument] = []


class _CallsInProgress(threading.local):
    def __init__(self) -> None:
        self.running: list[CallInProgress] = []
        self.inputs: dict[str, Noted] = {}


class InputRewriter:
    """Lets rules act on the arguments of one module.

    Args:
        factory: makes the rewriters, and has the clock.
        module: the module.
        path: its path.
        notes_inputs: a rule asks for what goes into the module.

    Attributes:
        rewriters: the rules of each argument.
    """

    def __init__(self, factory: RewriterFactory, module: nn.Module, path: str, *, notes_inputs: bool = False) -> None:
        self._factory = factory
        self._find_module = weakref.ref(module)
        self._path = path
        self.rewriters = SiteRewriters(factory, module, path)
        self._calls = CallNumbers(factory.clock)
        self._names = ArgumentNames(module)
        self._notes_inputs = notes_inputs
        self._shares: dict[Keys, PlainShare | None] = {}
        self._here = _CallsInProgress()

    def rewrite_input(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The forward pre-hook."""
        self._end_interrupted(module)
        if not self._factory.is_active:
            return args, kwargs
        if self._factory.clock.here.depth == 0:
            self._factory.clock.part_begins(module, args, kwargs)
        again = is_in_backward()
        running = CallInProgress(self._calls.find_again() if again else self._calls.begin(), again=again)
        self._here.running.append(running)
        return self._change(module, args, kwargs, running)

    def end_call(self, module: nn.Module, output: Any) -> None:
        """The forward hook, called with None for a call that raised."""
        if not self._here.running:  # a hook before ours has raised
            return
        running = self._here.running.pop()
        self._here.inputs = running.inputs
        self._leave(module, running)
        if output is None or not running.uses:
            return
        outputs = [tensor for _, tensor in flatten(output, ()) if tensor.requires_grad]
        for use in running.uses:
            if use.tensor._version != use.version:
                self._watch_overwritten(use, outputs)
            elif any(each._base is use.tensor._base for each in outputs):  # who gets it may write into it
                self._factory.watch_view(use.rewriter.name, use.tensor)

    def begin_compiled_call(self, trains: bool, training: bool) -> RewrittenCompiledCall | None:
        """Begin a call that compiled code makes."""
        return begin_compiled_call(self._factory, self.rewriters, self._calls, trains=trains, training=training)

    def take_inputs(self) -> dict[str, Noted]:
        """Take the inputs of the call that has just ended, by argument."""
        inputs, self._here.inputs = self._here.inputs, {}
        return inputs

    def remove(self) -> None:
        """The rules act no more, maybe in the middle of a call."""
        module = self._find_module()
        for running in reversed(self._here.running):
            if module is not None:
                self._leave(module, running)

    def _end_interrupted(self, module: nn.Module) -> None:
        """End calls that were left by KeyboardInterrupt, which runs no hooks."""
        running = self._here.running
        if running:
            around = max(0, count_calls(module) - 1)  # none are seen from compiled code
            while len(running) > around:
                self._leave(module, running.pop())

    def _leave(self, module: nn.Module, running: CallInProgress) -> None:
        """Take back what was put in place for a call."""

    def _change(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], running: CallInProgress
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = self._names.bind(args, kwargs)
        changed = self._change_tensors(module, bound, running)
        return (args, kwargs) if changed is bound else self._names.unbind(changed, args, kwargs)

    def _change_tensors(self, module: nn.Module, bound: dict[str, Any], running: CallInProgress) -> dict[str, Any]:
        number = running.call.number if running.call is not None else 1
        changed: dict[Keys, Tensor] = {}
        reached: list[tuple[Keys, SiteRewriter, Tensor]] = []
        for keys, tensor in flatten(bound, _INPUT):
            rewriter = self.rewriters.find(keys, number)
            value = tensor
            if rewriter is not None:
                value = rewriter.change_value(tensor, running.call, module.training, again=running.again)
                reached.append((keys, rewriter, value))
            if value is not tensor:
                changed[keys] = value
            if self._notes_inputs:
                running.inputs[".".join(keys[1:])] = self._note(keys, value)
        for keys, rewriter, value in reached if has_gradient(running.call, again=running.again) else ():
            new = self._watch_use(rewriter, value, running, module.training)
            if new is not value:
                changed[keys] = new
        return replace_tensors(bound, _INPUT, changed) if changed else bound

    def _note(self, keys: Keys, value: Tensor) -> Noted:
        parts, known = self._factory.clock.parts, self._shares.get(keys)
        if not parts.is_any:
            return Noted(value)
        share = parts.find(value, str(Site(self._path, keys)), known, is_placed=keys in self._shares)
        if value.grad_fn is not None:
            self._shares[keys] = share
        return Noted(value, share)

    def _watch_use(self, rewriter: SiteRewriter, tensor: Tensor, running: CallInProgress, training: bool) -> Tensor:
        if not tensor.requires_grad or rewriter.gradient is None:
            return tensor
        edge, number = get_gradient_edge(tensor), next_sequence_number()
        branched = rewriter.watch(tensor, training, branches=True, is_private=True, inputs=running.inputs)
        if branched is not tensor:
            running.uses.append(_BranchedArgument(rewriter, branched, edge, number))
        return branched

    def _watch_overwritten(self, use: _BranchedArgument, outputs: list[Tensor]) -> None:
        """Hook the gradient of an argument that the module has written into, past the branch."""
        rewriter, guard = use.rewriter, self._factory.clock.here.guard
        if (
            rewriter.gradient is None
            or rewriter.needs_value
            or rewriter.needs_input
            or not change_input_gradient(use.edge, outputs, use.number, rewriter.gradient, guard, use.node)
        ):
            raise CannotRewriteError(
                f"{use.rewriter.name} is written into by its module, so that its gradient cannot be changed there.",
                repair="let the module work out of place (inplace=False), or set the rule on its output's gradient.",
                reason="what is computed with the overwritten tensor hands its gradient on in several parts.",
            )


class OutputRewriter:
    """Lets rules act on the results of one module.

    Args:
        factory: makes the rewriters, and has the clock.
        module: the module.
        path: its path.
        inputs: notes what goes into the module, where a rule asks for that.

    Attributes:
        rewriters: the rules of each tensor that it returns.
    """

    def __init__(
        self, factory: RewriterFactory, module: nn.Module, path: str, inputs: InputRewriter | None = None
    ) -> None:
        self._factory = factory
        self._clock = factory.clock
        self.rewriters = SiteRewriters(factory, module, path)
        self._calls = CallNumbers(factory.clock)
        self._plain: dict[int, SiteRewriter | None] = {}
        self._inputs = inputs
        self._names = ArgumentNames(module)

    def rewrite_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The forward hook: what is returned instead."""
        if not self._factory.is_active:
            return output
        inputs = self._inputs.take_inputs() if self._inputs is not None else None
        here = self._clock.threads.own
        if here.depth == 0:
            self._clock.part_begins(module, args, kwargs)
        calls = self._calls
        if type(output) is not Tensor or not grad_enabled() or is_in_backward():
            return self._rewrite(module, args, kwargs, output, inputs)
        number = calls.count_on(here)
        rewriter = self._plain[number] if number in self._plain else self._find_plain(number)
        if rewriter is None:
            return output
        new = output
        if rewriter.acts_on_value:
            beside = self._show(args, kwargs, inputs) if rewriter.value_needs_input else None
            new = rewriter.change_value(output, calls.note(number), module.training, again=False, beside=beside)
        branches = bool(kwargs) and is_among(new, (args, kwargs))
        for each in () if kwargs else args:
            if new is each or type(each) is not Tensor:
                branches = is_among(new, args)
                break
        return rewriter.watch(new, module.training, branches=branches, inputs=inputs)

    def begin_compiled_call(self, trains: bool, training: bool) -> RewrittenCompiledCall | None:
        """Begin a call that compiled code makes."""
        return begin_compiled_call(self._factory, self.rewriters, self._calls, trains=trains, training=training)

    def _find_plain(self, number: int) -> SiteRewriter | None:
        rewriter = self.rewriters.find(_OUTPUT, number)
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
        """Rewrite any kind of result, also without grad and where it is computed again."""
        again = is_in_backward()
        call = self._calls.find_again() if again else self._calls.begin()
        given, beside = (args, kwargs), self._show(args, kwargs, inputs)
        return self.rewriters.rewrite(
            output, _OUTPUT, call, module.training, again=again, given=given, inputs=inputs, beside=beside
        )

    def _show(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Mapping[str, Noted] | None) -> Beside | None:
        """What a rule on the value is shown: what the module was called with, with its graph; None if none asks."""
        if not inputs:
            return None
        bound = flatten(self._names.bind(args, kwargs), _INPUT)
        return Beside(None, inputs, {".".join(keys[1:]): tensor for keys, tensor in bound})


class WatchedRewriter:
    """Lets rules act on what is handed to ``rg.watch``.

    Args:
        factory: makes the rewriters, and has the clock.
        assignments: the rules by their sites.

    Attributes:
        everywhere: the patterns of all rules, as a text.
    """

    def __init__(self, factory: RewriterFactory, assignments: Assignments) -> None:
        self._factory = factory
        self._assignments = assignments
        self.everywhere = "\n".join(describe_pattern(each.pattern) for each in assignments.all)
        self._watched: dict[str, tuple[SiteRewriters, CallNumbers]] = {}

    def may_rewrite(self, name: str, places: Sequence[Keys]) -> bool:
        """Return whether rules may act at what is watched under this name, a tensor at each of these places."""
        calls = {1, 2, *map(int, re.findall(r"#(\d+)", self.everywhere))}  # all further calls are like the second
        sites = [Site(WATCH + name, keys, call) for keys in places for call in calls]
        return any(self._assignments.may_reach(Candidate(each)) for site in sites for each in (site, site.grad))

    def rewrite_watched(self, name: str, value: Any) -> Any:
        """Let the rules change a tensor, or a nest of them; returns what takes its place."""
        if not self._factory.is_active:
            return value
        if name not in self._watched:
            self._watched[name] = SiteRewriters(self._factory, None, WATCH + name), CallNumbers(self._factory.clock)
        rewriters, calls = self._watched[name]
        again = is_in_backward()
        call = calls.find_again() if again else calls.begin()
        return rewriters.rewrite(value, (), call, True, again=again)


# ---- calls inside compiled code ----


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
