"""The updates of torch's optimizers: measured, told to the clock, and noted."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from retrograd.history.sink import Moment
from retrograd.hooks.faults import never_raise
from retrograd.hooks.loss_scales import LossScales
from retrograd.recording.clock import Clock
from retrograd.recording.emitter import Notes
from retrograd.recording.parameter_watch import ParameterWatch
from retrograd.recording.updates import UpdateTap

_SKIPPED = "loss scaling found a gradient that is not finite"


class Updated(Notes, Protocol):
    """What is needed of a recorder."""

    clock: Clock

    def optimizer_seen(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update, whatever it holds."""


class OptimizerWatch:
    """Listens to every optimizer of the process and heeds those of the recorded models.

    One that holds none of their parameters makes steps too, where no other one does: it may hold copies of them, or
    train what the models are only a part of. It counts when a backward pass has reached the models since the last step.

    Args:
        host: the recorder.
        parameters: the watches of parameters, by identity.

    Attributes:
        tap: measures the updates.
        scales: what losses were multiplied by.
    """

    def __init__(self, host: Updated, parameters: Mapping[int, ParameterWatch], tap: UpdateTap) -> None:
        self._host = host
        self._parameters = parameters
        self.fault = host.fault
        self.tap = tap
        self.scales = LossScales()
        self._numbers_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._next = 0
        self._strangers_only = True
        self._ran: WeakSet[nn.Module] = WeakSet()
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._undecided: list[tuple[Moment, str, int, torch.Tensor]] = []

    def add_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """These are of the recorded models."""
        for parameter in parameters:
            self._numbers_of.setdefault(parameter, None)
        for optimizer in [each for each, number in self._numbers.items() if _is_stranger(number)]:
            del self._numbers[optimizer]

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether it is of the recorded models."""
        return parameter in self._numbers_of

    def model_runs(self, model: nn.Module) -> None:
        """A recorded model, or a part that is called by itself, runs."""
        self._ran.add(model)

    @never_raise()
    def update_begins(self, optimizer: Optimizer) -> None:
        """``optimizer.step`` was called."""
        self._host.optimizer_seen(optimizer)
        number = self._find_number(optimizer)
        if number is None:
            return
        clock = self._host.clock
        clock.update_begins(number)
        if clock.on:
            parameters = self._parameters
            watches = [parameters[id(p)] for p in _all(optimizer) if id(p) in parameters]
            self.tap.begin(optimizer, watches, self.fault)

    @never_raise()
    def update_ends(self, optimizer: Optimizer, found_inf: torch.Tensor | None) -> None:
        """The parameters have been changed."""
        number = self._find_number(optimizer)
        if number is None:
            return
        self.tap.end(optimizer, self.fault)
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        name = type(optimizer).__name__
        if self._host.clock.on:
            self._tell(name, count, found_inf)
        self._end_update(number)

    def _tell(self, name: str, count: int, found_inf: torch.Tensor | None) -> None:
        if found_inf is None:
            self._host.note("update", name, value=count)
        else:
            self._undecided.append((self._host.clock.moment, name, count, found_inf))

    @never_raise()
    def update_skipped(self, optimizer: Optimizer) -> None:
        """Loss scaling left the parameters alone; the step counts all the same, so that it can be seen."""
        number = self._find_number(optimizer)
        if number is not None:
            self.tap.abandon(optimizer)
            self._host.note("skipped", type(optimizer).__name__, text=_SKIPPED)
            self._end_update(number)

    @never_raise()
    def loss_scaled(self, losses: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
        """The gradients of these losses are ``scale`` times too large."""
        if threading.get_ident() == self._host.clock.thread:
            self.scales.add(losses, scale)

    def decide(self) -> None:
        """Find out whether optimizers that heed loss scaling by themselves did update; this waits for their device."""
        undecided, self._undecided = self._undecided, []
        for moment, name, count, found_inf in undecided:
            if float(found_inf):
                self._host.note("skipped", name, text=_SKIPPED, moment=moment)
            else:
                self._host.note("update", name, value=count, moment=moment)

    def _end_update(self, number: int) -> None:
        if self._host.clock.update_made(number, self._does_leader_rest):
            self._ran.clear()

    def _does_leader_rest(self) -> bool:
        """Whether models have run since the last step, and none of them is what the leading optimizer updates."""
        leader = self._host.clock.leader
        if leader is None or _is_stranger(leader):
            return not self._strangers_only
        led = {id(each) for optimizer, number in self._numbers.items() if number == leader for each in _all(optimizer)}
        ran = list(self._ran)
        return bool(ran) and not any(id(each) in led for model in ran for each in nn.Module.parameters(model))

    def _find_number(self, optimizer: Optimizer) -> int | None:
        """The number of an optimizer, None if it does not concern us. One that replaces another has its number."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._make_number(optimizer)
        return number if not _is_stranger(number) or self._is_heeded() else None

    def _make_number(self, optimizer: Optimizer) -> int:
        self._next += 1
        ours = [parameter for parameter in _all(optimizer) if parameter in self._numbers_of]
        if not ours:
            return -self._next
        self._strangers_only = False
        number = next((found for each in ours if (found := self._numbers_of[each]) is not None), self._next)
        for parameter in ours:
            self._numbers_of[parameter] = number
        return number

    def _is_heeded(self) -> bool:
        """Whether a stranger's update counts."""
        clock = self._host.clock
        return self._strangers_only and clock.was_reached and threading.get_ident() == clock.thread


def _is_stranger(number: int) -> bool:
    return number < 0


def _all(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
