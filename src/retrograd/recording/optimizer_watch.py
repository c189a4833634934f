"""The updates of optimizers: measured, told to the clock and noted; and what they update outside of the models."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer

from retrograd.history.sink import Moment
from retrograd.hooks.faults import never_raise
from retrograd.hooks.names import parameter_site
from retrograd.hooks.optimizer import list_optimizers
from retrograd.progress.loss_scales import LossScales
from retrograd.progress.steps import Steps, held_by
from retrograd.recording.clock import Clock
from retrograd.recording.emitter import Notes
from retrograd.recording.parameter_watch import ParameterWatch, UpdateTap
from retrograd.recording.taps import Taps
from retrograd.sites.site import OPTIMIZER, Site


class LooseParameters:
    """Taps what optimizers hold, under ``optimizer/CLASS:GROUP.INDEX`` or the name that the optimizer was given.

    A second optimizer of the same class is ``CLASS_2``. Those that are there when the first backward pass begins are
    looked at then, when the models that have run are known and what is left is loose; later ones when they update.

    Args:
        taps: sets the hooks.
        is_known: whether a tensor is a parameter of a recorded model.
        found: told of those that are tapped.
    """

    def __init__(
        self, taps: Taps, is_known: Callable[[torch.Tensor], bool], found: Callable[[list[torch.Tensor]], None]
    ) -> None:
        self._taps = taps
        self._is_known = is_known
        self._found = found
        self._has_looked = False
        self._counts: Counter[str] = Counter()
        self._names: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._groups: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def look(self) -> None:
        """A backward pass begins."""
        if not self._has_looked:
            self._has_looked = True
            for optimizer in list_optimizers():
                self.see(optimizer)

    def see(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update: does it hold anything new?"""
        if self._groups.get(optimizer) == len(optimizer.param_groups):
            return
        self._groups[optimizer] = len(optimizer.param_groups)
        loose = [each for each in _list(optimizer) if not self._is_known(each[1])]
        for keys, tensor in loose:
            self._taps.tap_parameter(Site(f"{OPTIMIZER}{self._name(optimizer)}", keys), None, tensor)
        self._found([tensor for _, tensor in loose])

    def _name(self, optimizer: Optimizer) -> str:
        name = self._names.get(optimizer)
        if name is None:
            kind = type(optimizer).__name__
            self._counts[kind] += 1
            number = self._counts[kind]
            name = self._names[optimizer] = kind if number == 1 else f"{kind}_{number}"
        return name


def _list(optimizer: Optimizer) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The keys and the tensor of each parameter."""
    for number, group in enumerate(optimizer.param_groups):
        for index, tensor in enumerate(group["params"]):
            yield _make_keys(group, number, index), tensor


def _make_keys(group: Mapping[str, Any], number: int, index: int) -> tuple[str, ...]:
    names = group.get("param_names")  # of an optimizer that was made of named parameters
    if not names:
        return str(number), str(index)
    first, *rest = str(names[index]).split(".")
    return (*parameter_site(OPTIMIZER, first).keys, *rest)


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
