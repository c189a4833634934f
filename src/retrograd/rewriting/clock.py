"""What rules are told of the time: the step, the call, and by what the gradients of the running pass are multiplied."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.hooks.deep_graphs import FREE_DEPTH, DeepGraphGuard
from retrograd.hooks.engine import current_graph_task, grad_enabled
from retrograd.hooks.leader import Leader
from retrograd.hooks.loss_scales import LossScales
from retrograd.hooks.nested import flatten


class _Here(threading.local):
    def __init__(self) -> None:
        self.guard = DeepGraphGuard()
        self.scale: torch.Tensor | None = None
        self.in_backward = False


class Clock:
    """Counts steps and forwards, and finds the loss scale of each backward pass.

    Attributes:
        step: updates that the leading optimizer has made, those that loss scaling skipped among them.
        serial: grows when the calls of modules are counted anew: with the first forward after a backward pass or an
            update, and with each one in eval mode or without grad.
    """

    def __init__(self) -> None:
        self.step = 0
        self.serial = 0
        self._stale = True
        self._here = _Here()
        self._leader = Leader()
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._next = itertools.count()
        self._scales = LossScales()
        self._last_scale: torch.Tensor | None = None

    @property
    def guard(self) -> DeepGraphGuard:
        """Of the graph that this thread makes."""
        return self._here.guard

    @property
    def scale(self) -> torch.Tensor | None:
        """What the gradients of the running pass are multiplied by; None for nothing.

        A device's own thread knows of no pass that it has asked for; there it is that of the pass that began last.
        """
        if self._last_scale is None:
            return None
        here = self._here
        return here.scale if here.in_backward else self._last_scale

    # ---- forward ----

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called."""
        if current_graph_task() != -1:
            return
        guard = self._here.guard
        if guard.count > FREE_DEPTH and not _continues_a_graph((args, kwargs)):
            guard.part()
        if self._stale or not (module.training and grad_enabled()):
            self._stale = False
            self.serial += 1

    def after_call(self, module: nn.Module, output: Any) -> None:
        """That call has ended."""
        if current_graph_task() == -1:
            self._here.guard.pause()
            self._stale |= output is None  # raised, most likely: its calls are not to be counted on from

    # ---- backward ----

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """A pass starts from these tensors."""
        here = self._here
        here.in_backward = True
        here.scale = self._last_scale = self._scales.find(roots)

    def backward_ends(self, failed: bool) -> None:
        """That pass has ended."""
        here = self._here
        here.in_backward = False
        here.scale = None
        here.guard.restart()
        self._stale = True

    # ---- updates ----

    def loss_scaled(self, losses: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
        """These losses were multiplied."""
        self._scales.add(losses, scale)

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update."""
        self._leader.update_begins(self._number(optimizer))

    def update_ends(self, optimizer: Optimizer, found_inf: torch.Tensor | None) -> None:
        """It has updated."""
        self.update_skipped(optimizer)

    def update_skipped(self, optimizer: Optimizer) -> None:
        """It has updated, or was to."""
        if self._leader.ends_step(self._number(optimizer)):
            self.step += 1
            self._stale = True
            self._scales.forget()
            self._last_scale = None

    def _number(self, optimizer: Optimizer) -> int:
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = next(self._next)
        return number


def _continues_a_graph(arguments: Any) -> bool:
    return any(tensor.requires_grad and not tensor.is_leaf for _, tensor in flatten(arguments, ()))
