"""What the models are called with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from retrograd.facts.readings import Readings, TensorReading, name_type
from retrograd.facts.source import FactHost, FactSource
from retrograd.history.facts import Input, tell_number
from retrograd.history.sink import Moment, Phase
from retrograd.hooks.engine import grad_enabled
from retrograd.hooks.names import argument_names
from retrograd.hooks.nested import flatten
from retrograd.sites.site import ROOT, Site

_MOST = 6
"""Tensors of one call."""
_ELEMENTS = 1 << 20
"""Of a larger tensor some rows are read, except at looks."""
_ROWS = 64
"""Tensors that are collected, and written, at once."""
_SECONDS = 1.0
"""Or what there is after this time."""
_WAITING = 256
"""Tensors that may wait to be collected."""

_EACH = ("step", "phase", "value", "min", "max", "std", "nonfinite", "digest")

Head = tuple[str, tuple[int, ...], str]
"""Name, shape and type."""


class InputSource(FactSource):
    """Notes tensors that models are called with: of the first call with, and without, grad mode in a recorded step."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._models: WeakKeyDictionary[nn.Module, tuple[str, list[str], str]] = WeakKeyDictionary()
        self._names: dict[tuple[str, tuple[str, ...]], str] = {}
        self._readings = Readings()
        self._pending: list[tuple[int, int, Phase, Head]] = []
        self._since = 0.0
        self._step = -1
        self._seen: set[tuple[str, bool]] = set()

    def model_added(self, name: str, model: nn.Module) -> None:
        """A model is recorded from now on."""
        self._models[model] = (name or ROOT, *argument_names(model))

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called."""
        if not self.host.is_recorded or len(self._pending) > _WAITING:
            return
        step = self.host.step
        if step != self._step:
            self._step = step
            self._seen.clear()
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = (self.host.name_module(model) or ROOT, *argument_names(model))
        name, names, rest = known
        has_grad = grad_enabled()
        if (name, has_grad) in self._seen:
            return
        self._seen.add((name, has_grad))
        phase: Phase = "no_grad" if not has_grad else "train" if model.training else "eval"
        for keys, tensor in _bind(arguments, names, rest):
            self._read(step, phase, self._name(name, keys), tensor)

    def drain(self) -> None:
        """Collect what was read."""
        if len(self._pending) >= _ROWS or (self._pending and time.monotonic() - self._since > _SECONDS):
            self._write()

    def end(self) -> None:
        """Recording ends."""
        self._write()

    def _read(self, step: int, phase: Phase, name: str, tensor: torch.Tensor) -> None:
        shape, dtype = tuple(tensor.shape), name_type(tensor.dtype)
        if tensor.numel() > _ELEMENTS and len(tensor) > 1 and not self.host.is_look:
            tensor = tensor[:: min(len(tensor), -(-tensor.numel() // _ELEMENTS))]
        number = self._readings.read(tensor)
        if number is not None:
            if not self._pending:
                self._since = time.monotonic()
            self._pending.append((number, step, phase, (name, shape, dtype)))

    def _name(self, model: str, keys: tuple[str, ...]) -> str:
        name = self._names.get((model, keys))
        if name is None:
            name = self._names[model, keys] = str(Site(model, keys))
        return name

    def _write(self) -> None:
        found = self._readings.collect()
        pending, self._pending = self._pending, []
        rows: dict[Head, list[str]] = {}
        for number, step, phase, head in pending:
            rows.setdefault(head, []).append(_tell(step, phase, found[number]))
        for (name, shape, dtype), texts in rows.items():
            self.host.note_many(Input, name, {"shape": shape, "dtype": dtype}, _EACH, texts, Moment(self._step))


def _bind(arguments: Any, names: list[str], rest: str) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    args, kwargs = arguments
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor) and names:  # nearly always
        yield ("input", names[0]), args[0]
        return
    bound = dict(zip(names, args, strict=False))
    if len(args) > len(names):
        bound[rest] = args[len(names) :]
    for count, found in enumerate(flatten(bound | kwargs, ("input",))):
        if count == _MOST:
            return
        yield found


def _tell(step: int, phase: Phase, reading: TensorReading) -> str:
    numbers = (reading.mean, reading.min, reading.max, reading.std)
    told = ",".join(map(tell_number, numbers))
    return f'[{step},"{phase}",{told},{reading.nonfinite},"{reading.digest}"]'
