"""Parameters and buffers, when they are looked at: before a forward of some steps, and when recording ends."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from retrograd.facts.readings import Readings, TensorReading, name_type
from retrograd.facts.source import FactHost, FactSource
from retrograd.history.facts import Buffer, Parameter, tell_number
from retrograd.history.sink import Moment
from retrograd.hooks.engine import grad_enabled
from retrograd.hooks.names import walk_buffers, walk_parameters
from retrograd.hooks.storages import count_same_rows

_BUFFER = 1 << 20
"""Elements of the largest buffer that is read."""
_PARAMETER_EACH = ("name", "value", "shape", "dtype", "requires_grad", "grad", "digest", "same_rows", "tied")
_BUFFER_EACH = ("name", "value", "dtype", "min", "max", "digest")

_quote = lru_cache(maxsize=1 << 14)(json.dumps)
"""A name as JSON."""


class StateSource(FactSource):
    """Notes parameters and buffers as they are before the first forward of a step that is looked at, and in the end.

    What gradients there are is asked behind each backward pass of that step.
    """

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._models: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._has_same_rows: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
        self._readings = Readings()
        self._looks: dict[str, _Look] = {}
        self._step = -1

    def model_added(self, name: str, model: nn.Module) -> None:
        """A model is recorded from now on."""
        self._models[model] = name

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called."""
        if not self.host.is_look or not grad_enabled():
            return
        step = self.host.step
        if step != self._step:
            self._write()
            self._step = step
        for each, name in list(self._models.items()):
            if name not in self._looks:
                self._look(name, each)

    def backward_ends(self, failed: bool) -> None:
        """A backward pass has ended."""
        if failed or not self._looks or self.host.step != self._step:
            return
        for look in self._looks.values():
            look.read_gradients(self._readings)

    def drain(self) -> None:
        """Note what was looked at, when its step is over."""
        if self._looks and self.host.step != self._step:
            self._write()

    def end(self) -> None:
        """Recording ends: look a last time."""
        self._write()
        self._step = self.host.step
        for model, name in list(self._models.items()):
            self._look(name, model)
        self._write()

    def _look(self, name: str, model: nn.Module) -> None:
        known = self._has_same_rows.get(model)
        look = self._looks[name] = _Look(name, model, self._readings, known)
        self._has_same_rows[model] = look.has_same_rows

    def _write(self) -> None:
        looks, self._looks = self._looks, {}
        if looks:
            found = self._readings.collect()
            for name, look in looks.items():
                moment = Moment(self._step)
                self.host.note_many(Parameter, name, {}, _PARAMETER_EACH, look.tell_parameters(found), moment)
                self.host.note_many(Buffer, name, {}, _BUFFER_EACH, look.tell_buffers(found), moment)


class _Look:
    """A look at one model."""

    def __init__(self, name: str, model: nn.Module, readings: Readings, with_same_rows: set[str] | None) -> None:
        self._name = name
        self._names: dict[int, list[str]] = {}
        self._tensors: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._parameters: dict[str, tuple[int | None, list[int], str, str, int]] = {}
        self._buffers: list[tuple[str, str, int]] = []
        self._gradients: dict[str, list[int]] = {}
        self._has_gradients = False
        for site, parameter in self._walk(model):
            rows = 0
            if _may_have_rows(parameter) and (with_same_rows is None or site in with_same_rows):
                rows = count_same_rows(parameter)
            shape, requires_grad = list(parameter.shape), "true" if parameter.requires_grad else "false"
            self._parameters[site] = readings.read(parameter), shape, name_type(parameter.dtype), requires_grad, rows
        for site, buffer in walk_buffers([(name, model)]):
            if 0 < buffer.numel() <= _BUFFER and (buffer.is_floating_point() or buffer.numel() == 1):
                number = readings.read(buffer)
                if number is not None:
                    self._buffers.append((site, name_type(buffer.dtype), number))

    @property
    def has_same_rows(self) -> set[str]:
        """Parameters of which rows are equal."""
        return {site for site, facts in self._parameters.items() if facts[-1]}

    def _walk(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter once, under its first name."""
        for site, parameter in walk_parameters([(self._name, model)]):
            names = self._names.setdefault(id(parameter), [])
            names.append(site)
            if len(names) == 1 and not torch.nn.parameter.is_lazy(parameter):
                self._tensors.append((site, weakref.ref(parameter)))
                yield site, parameter

    def read_gradients(self, readings: Readings) -> None:
        """Look at what gradients there are."""
        self._has_gradients = True
        for site, find in self._tensors:
            parameter = find()
            gradient = None if parameter is None else parameter.grad
            if gradient is not None:
                number = readings.read(gradient, has_digest=False)
                if number is not None:
                    self._gradients.setdefault(site, []).append(number)

    def tell_parameters(self, found: dict[int, TensorReading]) -> list[str]:
        """The parameters as rows in JSON."""
        tied = {names[0]: json.dumps(names[1:]) for names in self._names.values() if len(names) > 1}
        rows = []
        for site, (number, shape, dtype, requires_grad, same_rows) in self._parameters.items():
            reading = found.get(number) if number is not None else None
            rms, digest = ("null", "") if reading is None else (tell_number(reading.rms), reading.digest)
            grad = self._describe_gradient(site, found)
            rows.append(
                f'[{_quote(site)},{rms},{shape},"{dtype}",{requires_grad},"{grad}","{digest}",{same_rows},'
                f"{tied.get(site, '[]')}]"
            )
        return rows

    def _describe_gradient(self, site: str, found: dict[int, TensorReading]) -> str:
        read = [found[number] for number in self._gradients.get(site, ())]
        if not read:
            return "None" if self._has_gradients else ""
        return "zero" if all(each.zeros == each.elements for each in read) else "some"

    def tell_buffers(self, found: dict[int, TensorReading]) -> list[str]:
        """The buffers as rows in JSON."""
        rows = []
        for site, dtype, number in self._buffers:
            reading = found[number]
            numbers = ",".join(map(tell_number, (reading.min, reading.max)))
            rows.append(f'[{_quote(site)},{tell_number(reading.mean)},"{dtype}",{numbers},"{reading.digest}"]')
        return rows


def _may_have_rows(parameter: torch.Tensor) -> bool:
    return (
        type(parameter) in (torch.nn.Parameter, torch.Tensor)
        and parameter.device.type == "cpu"
        and parameter.dim() >= 2
        and len(parameter) > 1
        and parameter.numel() > 0
    )
