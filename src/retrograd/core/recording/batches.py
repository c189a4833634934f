"""How many samples a step has, and the batch size of a run: counted at the first model that is trained."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from retrograd.core.history.scalar_names import SAMPLES, TOKENS
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.optimizer import held_by, list_optimizers
from retrograd.core.hooks.parts import gradient_of, parameters_of
from retrograd.core.identities import IdentitySet

_MOST = 64
"""Calls that are remembered until the first backward pass tells which model is trained."""


class _ModelCall(NamedTuple):
    model: weakref.ref[nn.Module]
    step: int
    kind: str
    samples: int
    size: int


class BatchCount:
    """Counts the samples of each step: those of the first model that a backward pass reaches, or an optimizer holds.

    What is called before that for its output alone (a teacher, a trial of the shapes) has batches of another size.

    Args:
        describe: takes the batch size for the manifest: that of the first training step.

    Attributes:
        samples: of each step how many, and of what kind.
    """

    def __init__(self, describe: Callable[..., None]) -> None:
        self._describe = describe
        self._root: weakref.ref[nn.Module] | None = None
        self._called: deque[_ModelCall] = deque(maxlen=_MOST)
        self._is_told = False
        self.samples: dict[int, tuple[int, str]] = {}

    def forward_begins(self, model: nn.Module, arguments: Any, step: int) -> None:
        """A model is called in training mode with grad."""
        root = self._root() if self._root is not None else None
        if root is not None and root is not model:
            return
        args, _ = arguments
        first = args[0] if args else None
        if not _has_batch(first):
            first = next((each for _, each in flatten(arguments, ()) if _has_batch(each)), None)
        if first is None:
            return
        kind = TOKENS if first.dim() == 2 and not first.is_floating_point() else SAMPLES
        samples = first.numel() if kind == TOKENS else len(first)
        call = _ModelCall(weakref.ref(model), step, kind, samples, len(first))
        if root is None:
            self._called.append(call)
        else:
            self._add(call)

    def pass_ends(self) -> None:
        """A backward pass has ended: of the models that were called before it, the first that is trained counts."""
        if not self._called:
            return
        called, models = list(self._called), IdentitySet[nn.Module]()
        self._called.clear()
        models.update(model for call in called if (model := call.model()) is not None)
        root = find_trained(models)
        if root is None:
            return
        self._root = weakref.ref(root)
        *_, last = mine = [call for call in called if call.model() is root]
        for call in mine:
            if (call.step, call.size) == (last.step, last.size):
                self._add(call)
        if not self._is_told:
            self._is_told = True
            self._describe(batch=last.size)

    def _add(self, call: _ModelCall) -> None:
        self.samples[call.step] = self.samples.get(call.step, (0, ""))[0] + call.samples, call.kind


def _has_batch(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dim() > tensor.is_floating_point()  # a vector has none


def find_trained(models: IdentitySet[nn.Module]) -> nn.Module | None:
    """The first of some models that has gradients or that an optimizer holds; else the first that could have some."""
    held = {id(each) for optimizer in list_optimizers() for each in held_by(optimizer)} if len(models) > 1 else set()
    could = [model for model in models if any(each.requires_grad for each in parameters_of(model))]
    are = (
        model
        for model in could
        if any(id(each) in held or gradient_of(each) is not None for each in parameters_of(model))
    )
    return next(are, could[0] if could else None)
