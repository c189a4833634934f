"""The updates of torch's optimizers: measured, told to the clock, and noted."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer

from retrograd.history.sink import Moment
from retrograd.hooks.loss_scales import LossScales
from retrograd.recording.clock import Clock
from retrograd.recording.emitter import Notes
from retrograd.recording.faults import harmless
from retrograd.recording.parameter_watch import ParameterWatch
from retrograd.recording.updates import UpdateTap

_SKIPPED = "loss scaling found a gradient that is not finite"


class Updated(Notes, Protocol):
    """What is needed of a recorder."""

    clock: Clock


class OptimizerWatch:
    """Listens to every optimizer of the process and heeds those of the recorded models.

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
        self._ours: set[int] = set()
        self._owners: dict[int, int] = {}
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._undecided: list[tuple[Moment, str, int, torch.Tensor]] = []

    def add_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """These are of the recorded models."""
        self._ours.update(map(id, parameters))

    @harmless
    def update_begins(self, optimizer: Optimizer) -> None:
        """``optimizer.step`` was called."""
        number = self._find_number(optimizer)
        if number is None:
            return
        clock = self._host.clock
        clock.update_begins(number)
        if clock.on:
            parameters = self._parameters
            self.tap.begin(optimizer, [parameters[id(p)] for p in _all(optimizer) if id(p) in parameters])

    @harmless
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
        self._host.clock.update_made(number)

    def _tell(self, name: str, count: int, found_inf: torch.Tensor | None) -> None:
        if found_inf is None:
            self._host.note("update", name, value=count)
        else:
            self._undecided.append((self._host.clock.moment, name, count, found_inf))

    @harmless
    def update_skipped(self, optimizer: Optimizer) -> None:
        """Loss scaling left the parameters alone; the step counts all the same, so that it can be seen."""
        number = self._find_number(optimizer)
        if number is not None:
            self.tap.abandon(optimizer)
            self._host.note("skipped", type(optimizer).__name__, text=_SKIPPED)
            self._host.clock.update_made(number)

    @harmless
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

    def _find_number(self, optimizer: Optimizer) -> int | None:
        """The number of an optimizer, None if it is not of our models. One that replaces another has its number."""
        number = self._numbers.get(optimizer)
        if number is None:
            ours = [id(parameter) for parameter in _all(optimizer) if id(parameter) in self._ours]
            if not ours:
                return None
            number = next((self._owners[each] for each in ours if each in self._owners), len(self._owners))
            self._owners.update(dict.fromkeys(ours, number))
            self._numbers[optimizer] = number
        return number


def _all(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
