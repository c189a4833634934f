"""What is set on the models: taps on the calls of modules, hooks on parameters, and the recorders that they lead to."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdRef

from retrograd.hooks.distributed import has_other_processes
from retrograd.hooks.module import CallTap, InputWatcher, unwatch_forward, watch_forward
from retrograd.hooks.names import NamedModule, parameter_site
from retrograd.recording.attribution import LateGradients
from retrograd.recording.keep import find_keep
from retrograd.recording.mode_buffer import Mode, ModeBuffer, ModeBuffers
from retrograd.recording.module_watch import ArgumentHost, ArgumentWatch, OutputWatch, SlotWatch
from retrograd.recording.parameter_watch import ParameterWatch
from retrograd.recording.settings import Settings
from retrograd.recording.site_recorder import NO_ROW, SiteRecorder, TensorHost, TensorRecorder
from retrograd.recording.site_table import RowTable
from retrograd.sites.pattern import Candidate
from retrograd.sites.site import LOCAL, OPTIMIZER, WATCH, Site, local_gradient


class TapHost(ArgumentHost, TensorHost, Protocol):
    """A recorder as its taps see it."""

    def parameter_watched(self, watch: ParameterWatch) -> None:
        """A parameter is recorded from now on."""


class Taps:
    """Sets taps where something is wanted, and takes them back. It holds nothing of the models.

    Args:
        host: the recorder.
        settings: what is wanted.
        buffers: where it goes.
        rows: the numbering of rows.
        slots: where the watches of what has calls are to be listed.
        late: told of every recorder that hooks tensors.

    Attributes:
        parameters: the watches of parameters, by identity.
        see_gradients: whether any gradient is recorded.
    """

    def __init__(
        self,
        host: TapHost,
        settings: Settings,
        buffers: ModeBuffers,
        rows: RowTable,
        slots: list[SlotWatch],
        late: LateGradients,
    ) -> None:
        self._host = host
        self._settings = settings
        self._buffers = buffers
        self._rows = rows
        self._late = late
        self._calls: list[CallTap] = []
        self._outputs: WeakKeyDictionary[nn.Module, OutputWatch] = WeakKeyDictionary()
        self._watched: dict[str, SlotWatch] = {}
        self._recorders: list[SiteRecorder] = []
        self._frozen: list[tuple[Site, weakref.ref[nn.Module] | None, WeakIdRef]] = []
        self._slots = slots
        self.parameters: dict[int, ParameterWatch] = {}
        self.see_gradients = False

    def tap_root(self, module: nn.Module, watcher: InputWatcher) -> None:
        """Tell ``watcher`` of the calls of a model, before and after everything within them."""
        self._calls.append(CallTap(module, watcher, outermost=True))

    def tap_calls(self, entry: NamedModule) -> None:
        """Record what a module returns and is called with, where that is wanted."""
        if not entry.is_called:
            return
        module, path = entry.module, entry.path
        if self._may_reach(entry, "output"):
            watch = self._outputs[entry.tapped] = OutputWatch(self._host, module, path, ("output",))
            watch_forward(entry.tapped, watch)
            self._add_slot(watch)
        if self._may_reach(entry, "input"):
            arguments = ArgumentWatch(self._host, module, path)
            self._calls.append(CallTap(entry.tapped, arguments))
            self._add_slot(arguments)

    def tap_parameters(self, entry: NamedModule) -> None:
        """Record a module's own parameters, where that is wanted."""
        for name, parameter in entry.parameters:
            self.tap_parameter(parameter_site(entry.path, name), entry.module, parameter)

    def release_loose(self, entry: NamedModule) -> None:
        """Parameters of a module are no longer recorded under the name that their optimizer gave them."""
        for _, parameter in entry.parameters:
            watch = self.parameters.get(id(parameter))
            if watch is not None and watch.site.path.startswith(OPTIMIZER):
                self.parameters.pop(id(parameter)).remove()

    def tap_thawed(self) -> None:
        """Parameters that have become trainable are recorded from now on."""
        frozen, self._frozen = self._frozen, []
        for entry in frozen:
            site, find_module, parameter = entry[0], entry[1], entry[2]()
            module = None if find_module is None else find_module()
            if parameter is None or (find_module is not None and module is None):
                continue
            if _trains(parameter):
                self.parameters.pop(id(parameter), None)
                self.tap_parameter(site, module, parameter)
            else:
                self._frozen.append(entry)

    def find_watched(self, name: str) -> SlotWatch:
        """The watch of a tensor that is watched by hand."""
        watch = self._watched.get(name)
        if watch is None:
            watch = self._watched[name] = SlotWatch(self._host, None, WATCH + name, ())
            self._add_slot(watch)
        return watch

    @property
    def called(self) -> set[str]:
        """Paths of modules that were called while a step was recorded."""
        return {watch.path for watch in self._slots if watch.was_called}

    def make_site_recorder(self, buffer: ModeBuffer, module: nn.Module | None, site: Site) -> SiteRecorder | None:
        """The recorder of a site, or None when neither its value nor its gradient is wanted."""
        value = self._make_tensor_recorder(buffer, module, site)
        gradient = self._make_tensor_recorder(buffer, module, site.grad) if buffer.mode is Mode.GRAD else None
        if value is None and gradient is None:
            return None
        recorder = SiteRecorder(self._host, value, gradient)
        self._recorders.append(recorder)
        self.see_gradients |= recorder.wants_gradient
        return recorder

    def make_named_recorder(self, mode: Mode, module: nn.Module | None, site: Site, key: str) -> SiteRecorder | None:
        """The recorder of a site that is recorded only where a pattern names its last key."""
        return self.make_site_recorder(self._buffers[mode], module, site) if self._settings.names(key) else None

    def remove(self) -> None:
        """Take every hook back."""
        for tap in self._calls:
            tap.remove()
        for module, watch in self._outputs.items():
            unwatch_forward(module, watch)
        for parameter in list(self.parameters.values()):
            parameter.remove()
        for recorder in self._recorders:
            recorder.remove()

    def tap_parameter(self, site: Site, module: nn.Module | None, parameter: torch.Tensor) -> None:
        """Record a parameter, one of no module among them, under this name, unless it has one already."""
        if id(parameter) in self.parameters:
            return
        buffer = self._buffers.grad
        trains = _trains(parameter)
        watch = ParameterWatch(
            self._host,
            site,
            parameter,
            partial(_forget, self.parameters, id(parameter)),
            value=self._make_tensor_recorder(buffer, module, site, copy=True),
            gradient=self._make_tensor_recorder(buffer, module, site.grad, copy=True) if trains else None,
            local=self._make_local(buffer, module, site) if trains else None,
            update=self._make_tensor_recorder(buffer, module, site.update) if trains else None,
        )
        if not trains:
            find_module = None if module is None else weakref.ref(module)
            self._frozen.append((site, find_module, WeakIdRef(parameter)))
        if watch.value or watch.gradient or watch.local or watch.update:
            self.parameters[id(parameter)] = watch
            self.see_gradients |= watch.gradient is not None
            self._host.parameter_watched(watch)

    def _make_local(self, buffer: ModeBuffer, module: nn.Module | None, parameter: Site) -> TensorRecorder | None:
        is_named = self._settings.names(LOCAL) and has_other_processes()
        return self._make_tensor_recorder(buffer, module, local_gradient(parameter), copy=True) if is_named else None

    def _may_reach(self, entry: NamedModule, slot: str) -> bool:
        return any(self._settings.may_reach(each) for each in entry.candidates() if each.site.slot == slot)

    def _add_slot(self, watch: SlotWatch) -> None:
        self._slots.append(watch)
        self._late.calls.append(watch.trained_calls)
        self._buffers.grad.forwards.calls.append(watch.trained_calls)

    def _make_tensor_recorder(
        self, buffer: ModeBuffer, module: nn.Module | None, site: Site, *, copy: bool = False
    ) -> TensorRecorder | None:
        candidate = Candidate(site, module)
        has_row = self._settings.wants_statistics(candidate)
        keep = find_keep(self._settings.keeps, candidate)
        if not has_row and keep is None:
            return None
        return TensorRecorder(
            buffer, site, self._rows.number(site) if has_row else NO_ROW, keep, copy=copy, host=self._host
        )


def _forget(parameters: dict[int, ParameterWatch], number: int, _: object) -> None:
    """A parameter is no longer there, and its number may become that of another."""
    parameters.pop(number, None)


def _trains(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and not is_lazy(parameter)
