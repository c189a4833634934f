"""The updates of torch's optimizers: measured, told to the clock, and noted."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer

from retrograd.history.sink import Moment
from retrograd.hooks.faults import never_raise
from retrograd.progress.loss_scales import LossScales
from retrograd.progress.steps import Steps, held_by
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

    Args:
        host: the recorder.
        steps: says which updates end a step.
        parameters: the watches of parameters, by identity.

    Attributes:
        tap: measures the updates.
        scales: what losses were multiplied by.
    """

    def __init__(self, host: Updated, steps: Steps, parameters: Mapping[int, ParameterWatch], tap: UpdateTap) -> None:
        self._host = host
        self._steps = steps
        self._parameters = parameters
        self.fault = host.fault
        self.tap = tap
        self.scales = LossScales()
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._undecided: list[tuple[Moment, str, int, torch.Tensor]] = []

    @never_raise()
    def update_begins(self, optimizer: Optimizer) -> None:
        """``optimizer.step`` was called."""
        self._host.optimizer_seen(optimizer)
        if not self._is_heeded(optimizer):
            return
        self._steps.update_begins(optimizer)
        if self._host.clock.on:
            parameters = self._parameters
            watches = [parameters[id(p)] for p in held_by(optimizer) if id(p) in parameters]
            self.tap.begin(optimizer, watches, self.fault)

    @never_raise()
    def update_ends(self, optimizer: Optimizer, found_inf: torch.Tensor | None) -> None:
        """The parameters have been changed."""
        if not self._is_heeded(optimizer):
            return
        self.tap.end(optimizer, self.fault)
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        name = type(optimizer).__name__
        if self._host.clock.on:
            self._tell(name, count, found_inf)
        self._end_update(optimizer)

    def _tell(self, name: str, count: int, found_inf: torch.Tensor | None) -> None:
        if found_inf is None:
            self._host.note("update", name, value=count)
        else:
            self._undecided.append((self._host.clock.moment, name, count, found_inf))

    @never_raise()
    def update_skipped(self, optimizer: Optimizer) -> None:
        """Loss scaling left the parameters alone; the step counts all the same, so that it can be seen."""
        if self._is_heeded(optimizer):
            self.tap.abandon(optimizer)
            self._host.note("skipped", type(optimizer).__name__, text=_SKIPPED)
            self._end_update(optimizer)

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

    def _end_update(self, optimizer: Optimizer) -> None:
        if self._steps.ends_step(optimizer):
            self._host.clock.end_step()

    def _is_heeded(self, optimizer: Optimizer) -> bool:
        """Whether an update counts. A stranger's does when a backward pass has reached the models since the last."""
        concerns = self._steps.concerns(optimizer)
        clock = self._host.clock
        if concerns is None:
            return clock.was_reached and threading.get_ident() == clock.thread
        return concerns
