"""The clock of rules: the step, the call, and the loss scale of the running pass."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.core.hooks.checkpoints import CallsOfParts, part_computed_again
from retrograd.core.hooks.engine import grad_enabled, is_in_backward
from retrograd.core.hooks.reach import DeepGraphGuard
from retrograd.core.progress.steps import LossScales, Steps
from retrograd.rewriting.plain_parts import PlainParts


class ThreadClock:
    """Each thread that trains has forwards, passes and losses of its own.

    Attributes:
        guard: of the graph that this thread makes.
        depth: how many calls of models it is in; in none, a part of one may be called by itself.
        serial: changes whenever the calls of modules are counted anew: with the first forward after a backward pass or
            an update, and with each one in eval mode or without grad. Such a forward in between leaves the count of
            training as it was.
        trained: the serial number of the last forward that trained.
    """

    __slots__ = ("depth", "ends", "guard", "in_backward", "scale", "scales", "serial", "trained")

    def __init__(self) -> None:
        self.guard = DeepGraphGuard()
        self.scales = LossScales()
        self.scale: torch.Tensor | None = None
        self.in_backward = False
        self.depth = 0
        self.serial = 0
        self.trained = 0
        self.ends = -1


class _ThreadClocks(threading.local):
    def __init__(self) -> None:
        self.own = ThreadClock()


class RuleClock:
    """Counts steps and forwards, and finds the loss scale of each backward pass.

    Attributes:
        step: how many have ended, as recordings count them; those that loss scaling skipped among them.
        steps: says which updates end one.
        pass_number: of the outermost backward pass that began last.
        was_run: a model has been called, or a backward pass has begun.
        when_skipped: called with an optimizer whose update loss scaling has skipped.
        threads: ``threads.own`` is what concerns this thread alone, without the call that ``here`` is.
        is_scaling: a loss has been multiplied by a scale.
        parts: knows which plain activations are parts of a tensor.

    Args:
        needs_wholes: a rule may need all elements of an activation.
    """

    def __init__(self, *, needs_wholes: bool = False) -> None:
        self.parts = PlainParts(is_wanted=needs_wholes)
        self.was_run = False
        self.when_skipped: Callable[[Optimizer], None] = lambda optimizer: None
        self.step = 0
        self.pass_number = 0
        self.threads = _ThreadClocks()
        self._ends = 0
        self._serials = itertools.count(1)
        self.steps = Steps()
        self._last_scale: torch.Tensor | None = None
        self.is_scaling = False

    @property
    def here(self) -> ThreadClock:
        """What concerns this thread alone."""
        return self.threads.own

    @property
    def scale(self) -> torch.Tensor | None:
        """The loss scale that gradients of the running pass are multiplied by; None for nothing.

        A device's own thread knows of no pass that it has asked for; there it is that of the pass that began last.
        """
        if not self.is_scaling:
            return None
        here = self.here
        return here.scale if here.in_backward else self._last_scale

    # ---- forward ----

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the call of a model."""
        self.was_run = True
        if is_in_backward():
            return
        self.steps.model_runs(module)
        here = self.here
        here.depth += 1
        here.guard.begin_forward((args, kwargs))
        if here.depth == 1:
            self.parts.forward_begins(module, (args, kwargs))
        if not (module.training and grad_enabled()):
            here.serial = next(self._serials)
        elif here.ends != self._ends:
            here.ends = self._ends
            here.serial = here.trained = next(self._serials)
        else:
            here.serial = here.trained

    def after_call(self, module: nn.Module, output: Any) -> None:
        """End the call."""
        if is_in_backward():
            return
        here = self.here
        here.depth = max(0, here.depth - 1)
        here.guard.pause()
        if output is None:  # raised, most likely: its calls are not to be counted on from
            here.ends = -1

    def part_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the call of a part of a model that is called by itself."""
        self.before_forward(module, args, kwargs)
        self.after_call(module, args)  # no hook tells of the end

    # ---- backward ----

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """Begin a pass from these tensors."""
        here = self.here
        self.was_run = here.in_backward = True
        here.scale = self._last_scale = here.scales.find(roots)
        self.pass_number += 1

    def backward_ends(self, failed: bool) -> None:
        """End the pass."""
        here = self.here
        here.in_backward = False
        here.scale = None
        here.guard.restart()
        self._ends += 1

    # ---- updates ----

    def loss_scaled(self, losses: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
        """Record that losses were multiplied by ``scale``."""
        self.is_scaling = True
        self.here.scales.add(losses, scale)

    def update_begins(self, optimizer: Optimizer) -> None:
        """Record that an optimizer is about to update."""
        if self._is_heeded(optimizer):
            self.steps.update_begins(optimizer)

    def update_ends(self, optimizer: Optimizer, found_inf: torch.Tensor | None) -> None:
        """End the step, if the update does."""
        self._end_update(optimizer)

    def update_skipped(self, optimizer: Optimizer) -> None:
        """End the step, if an update does that loss scaling has left out."""
        self._end_update(optimizer)
        self.when_skipped(optimizer)

    def _is_heeded(self, optimizer: Optimizer) -> bool:
        """Return whether an update counts; a stranger's does if the models have run since the last."""
        return self.steps.counts(optimizer, otherwise=self.steps.has_begun)

    def _end_update(self, optimizer: Optimizer) -> None:
        if self._is_heeded(optimizer) and self.steps.ends_step(optimizer):
            self.step += 1
            self._ends += 1
            self.here.scales.forget()
            self._last_scale = None
            self.here.depth = 0  # a forward that was left by KeyboardInterrupt has run no hook at its end


class RewrittenCall:
    """A call of a module, with its number.

    Attributes:
        number: which within the micro-batch, from 1.
        had_grad: grad was enabled, so that its results may have gradients of their own.
        remembered: what the rules of each site remembered before they saw its value.
    """

    __slots__ = ("had_grad", "number", "remembered")

    def __init__(self, number: int) -> None:
        self.number = number
        self.had_grad = grad_enabled()
        self.remembered: dict[Hashable, list[Mapping[str, Any]]] = {}


def has_gradient(call: RewrittenCall | None, *, again: bool) -> bool:
    """Return whether gradients arrive at what is computed now, and not at what was computed the first time."""
    return not again or call is None or not call.had_grad


class _Count:
    __slots__ = ("count", "only", "serial", "trained")

    def __init__(self) -> None:
        self.serial = -1
        self.count = 0
        self.trained = (-1, 0)
        self.only: RewrittenCall | None = None


class _ThreadCounts(threading.local):
    def __init__(self) -> None:
        self.own = _Count()


class CallNumbers:
    """Counts the calls of one module, for each thread by itself.

    Args:
        clock: says when they are counted anew.
    """

    def __init__(self, clock: RuleClock) -> None:
        self._clock = clock
        self._threads = _ThreadCounts()
        self._only: RewrittenCall | None = None
        self._parts = CallsOfParts[RewrittenCall]()

    def begin(self) -> RewrittenCall:
        """Number a call that was not there before, and remember it."""
        return self.note(self.count_on(self._clock.here))

    def count_on(self, clock: ThreadClock) -> int:
        """Number a call that was not there before, and is not asked for again, by the clock of this thread."""
        here = self._threads.own
        serial = clock.serial
        if here.serial != serial:  # count anew, or go on with a training that an evaluation has interrupted
            if here.serial == clock.trained:
                here.trained = here.serial, here.count
            here.count = here.trained[1] if here.trained[0] == serial else 0
            here.serial = serial
        here.count += 1
        here.only = self._only = None
        return here.count

    def note(self, number: int) -> RewrittenCall:
        """Remember the call of this number, for the case that a checkpointed part computes it again."""
        call = RewrittenCall(number)
        self._threads.own.only = self._only = call if number == 1 else None
        self._parts.add(call)
        return call

    def find_again(self) -> RewrittenCall | None:
        """Find the call that is computed again; None where it cannot be told from others."""
        part = part_computed_again()
        if not self._parts.knows(part):
            here = self._threads.own
            return here.only if here.count else self._only  # a device's own thread has made no calls
        return self._parts.find_next(part)
