"""Losses of evaluations: returned by models, or computed of what they return by a loss function of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from retrograd.core.hooks.dispatch import carry_out_unseen, read_unseen
from retrograd.core.hooks.engine import without_functions
from retrograd.core.hooks.listeners import never_raise
from retrograd.core.hooks.losses import find_loss_function, loss_listeners
from retrograd.core.hooks.nested import flatten
from retrograd.core.ranks.placements import own_values
from retrograd.core.recording.clock import Clock, Fault, is_loss
from retrograd.core.recording.deliveries import is_far

Number = float | torch.Tensor
"""A number, or a tensor of one element that has it, on any device."""

_RETURNED = ""
"""Kind of the losses that models return themselves."""


def hold(number: Any) -> Number:
    """A number as it is now, not waited for where it is on a device."""
    if not isinstance(number, torch.Tensor):
        return float(number)
    return read_unseen(number, _copy)


def _copy(number: torch.Tensor) -> Number:
    number = own_values(number)
    return number.clone() if is_far(number) else float(number)


class EvaluationLosses:
    """Sums the losses of the evaluations of each step, by kind.

    A loss that is computed counts from the end of a call of a model without grad, or in eval mode, to the begin of the
    next call of a model. Not where a call with grad of another model waits for its backward pass, as while a teacher
    runs in the middle of a step.

    Args:
        clock: says which step it is.
        fault: takes errors.
    """

    def __init__(self, clock: Clock, fault: Fault) -> None:
        self._clock, self.fault = clock, fault
        self._sums: dict[int, dict[str, tuple[Number, Number]]] = {}
        self._trained: str | None = None
        self._is_listening = False

    def forward_begins(self) -> None:
        """A model is called, or nothing more is recorded."""
        if self._is_listening:
            self._is_listening = False
            loss_listeners.remove(self)

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """Such a call has returned where no training follows."""
        loss = _find_loss(output)
        if loss is not None:
            self._add(_RETURNED, loss)
        elif output is not None and not self._is_within_step(model):
            self._is_listening = True
            loss_listeners.add(self)

    @never_raise()
    def loss_computed(self, kind: str, loss: torch.Tensor, count: Callable[[], int | torch.Tensor] | None) -> None:
        """Take what a loss function has returned."""
        if threading.get_ident() == self._clock.thread and is_loss(loss):
            self._add(kind, loss, count)

    def pass_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """Note of which loss function the program trains with, from the first pass."""
        if self._trained is None and len(roots) == 1:
            self._trained = find_loss_function(roots[0])

    def take_finished(self, end: int) -> Iterator[tuple[int, Number, Number]]:
        """Take those of steps before ``end``: sum and count, where it is known which of them are the losses."""
        for step in [step for step in self._sums if step < end]:
            sums = self._sums.pop(step)
            likely = next((kind for kind in (_RETURNED, self._trained) if kind in sums), None)
            kind = next(iter(sums)) if len(sums) == 1 else likely
            if kind is not None:
                yield step, *sums[kind]

    def _add(self, kind: str, loss: torch.Tensor, count: Callable[[], int | torch.Tensor] | None = None) -> None:
        with without_functions():
            value, weight = carry_out_unseen(lambda: (hold(loss.float()), 1.0 if count is None else hold(count())))
            sums = self._sums.setdefault(self._clock.step, {})
            total, counted = sums.get(kind, (0.0, 0.0))
            sums[kind] = total + value, counted + weight

    def _is_within_step(self, model: nn.Module) -> bool:
        grad = self._clock.buffers.grad
        waiting = [each.root for each in grad.forwards if not each.is_over] if not grad.reached else []
        return bool(waiting) and id(model) not in waiting


def _find_loss(output: Any) -> torch.Tensor | None:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named if is_loss(named) else None
    if isinstance(output, torch.Tensor):
        return output if output.dim() == 0 and is_loss(output) else None
    scalars = (
        [each for _, each in flatten(output, ()) if each.dim() == 0 and is_loss(each)] if output is not None else []
    )
    return scalars[0] if len(scalars) == 1 else None
