"""Sets taps on the models: on the calls of modules, and hooks on parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdRef

from retrograd.core.hooks.argument_taps import has_arguments_in_code, unwatch_arguments, watch_arguments
from retrograd.core.hooks.backward import runs_in_another_thread
from retrograd.core.hooks.compiled import has_compiled_code
from retrograd.core.hooks.dispatch import read_unseen
from retrograd.core.hooks.module import has_output_in_code, unwatch_forward, watch_forward
from retrograd.core.hooks.names import NamedModule, parameter_site
from retrograd.core.hooks.parts import gradient_of, own_parameters
from retrograd.core.identities import IdentityDict, IdentitySet
from retrograd.core.ranks.placements import own_values
from retrograd.core.ranks.processes import has_other_processes
from retrograd.core.recording.late_taps import CompiledRegions, warn_of_compiled_code
from retrograd.core.recording.module_watch import ArgumentWatch, OutputWatch, SlotCalls, SlotWatch
from retrograd.core.recording.parameter_watch import ParameterWatch, Reductions
from retrograd.core.recording.site_recorder import RecorderFactory, TensorRecorder
from retrograd.core.sites.site import LOCAL, OPTIMIZER, WATCH, Site, accumulated_gradient, local_gradient


class Taps:
    """Sets taps where something is wanted, and takes them back. It holds nothing of the models.

    Args:
        factory: makes the recorders that taps lead to.
        reductions: notified of parameters.

    Attributes:
        parameters: the watches of parameters, by identity.
        slots: the watches of what has calls.
        frozen: parameters that do not train, as site, module and parameter.
        calls: those with grad of each of these.
        unseen: for each model the parts with parameters of their own, until one of them has been seen.
        regions: parts of the models that are compiled by themselves.
        may_lack: parameters may have come that have no watch: no model has run yet, or a watched one is gone.
    """

    def __init__(self, factory: RecorderFactory, reductions: Reductions) -> None:
        self._factory = factory
        self._reductions = reductions
        self._settings = factory.settings
        self._grad = factory.buffers.grad
        self._inputs: IdentityDict[nn.Module, ArgumentWatch] = IdentityDict()
        self._outputs: IdentityDict[nn.Module, OutputWatch] = IdentityDict()
        self.regions = CompiledRegions(self._is_in_code)
        self.unseen: list[IdentitySet[nn.Module]] = []
        self._watched: dict[str, SlotWatch] = {}
        self.frozen: list[tuple[Site, weakref.ref[nn.Module] | None, WeakIdRef]] = []
        self.slots: list[SlotWatch] = []
        self.calls: list[SlotCalls] = []
        self._grad.forwards.calls = self.calls
        self.parameters: dict[int, ParameterWatch] = {}
        self.may_lack = True

    def tap_outputs(self, entry: NamedModule) -> None:
        """Record what a module returns, where that is wanted."""
        if entry.is_called and self._may_reach(entry, "output"):
            watch = self._outputs[entry.tapped] = OutputWatch(self._factory, entry.module, entry.path)
            watch_forward(entry.tapped, watch)
            self.add_slot(watch)

    def _is_in_code(self, module: nn.Module) -> bool | None:
        wanted = [
            tells(module)
            for watches, tells in ((self._outputs, has_output_in_code), (self._inputs, has_arguments_in_code))
            if module in watches
        ]
        return all(wanted) if wanted else None

    def expect(self, entries: Iterable[NamedModule]) -> None:
        """Expect calls of those parts of a model that have parameters of their own."""
        own = [entry.tapped for entry in entries if any(_trains(parameter) for _, parameter in entry.parameters)]
        self.unseen.append(IdentitySet(module for module in own if module in self._outputs))

    def tell_of_missing(self) -> None:
        """Warn, once, of a model that has gradients where compiled code without taps has run, and nothing else."""
        if runs_in_another_thread():
            return
        for modules in list(self.unseen):
            watches = [self._outputs[module] for module in modules]
            was_seen = any(watch.was_called for watch in watches)
            has_gradients = any(
                gradient_of(parameter) is not None for each in modules for parameter in own_parameters(each)
            )
            if was_seen or has_gradients or not watches:
                self.unseen.remove(modules)
            if has_gradients and not was_seen and has_compiled_code():
                warn_of_compiled_code(sorted(watch.path for watch in watches))

    def tap_inputs(self, entry: NamedModule) -> None:
        """Record what a module is called with, where that is wanted."""
        if entry.is_called and self._may_reach(entry, "input"):
            arguments = ArgumentWatch(self._factory, entry.module, entry.path)
            self._inputs[entry.tapped] = arguments
            watch_arguments(entry.tapped, arguments)
            self.add_slot(arguments)

    def tap_parameters(self, entry: NamedModule) -> None:
        """Record a module's own parameters, where that is wanted."""
        for name, parameter in entry.parameters:
            self.tap_parameter(parameter_site(entry.path, name), entry.module, parameter)

    def release_loose(self, entry: NamedModule) -> None:
        """Record a module's parameters no longer under the names that their optimizer gave them."""
        for _, parameter in entry.parameters:
            watch = self.parameters.get(id(parameter))
            if watch is not None and watch.site.path.startswith(OPTIMIZER):
                self.parameters.pop(id(parameter)).remove()

    def tap_thawed(self) -> None:
        """Record parameters that have become trainable."""
        frozen, self.frozen = self.frozen, []
        for entry in frozen:
            site, find_module, parameter = entry[0], entry[1], entry[2]()
            module = None if find_module is None else find_module()
            if parameter is None or (find_module is not None and module is None):
                continue
            if _trains(parameter):
                self.parameters.pop(id(parameter), None)
                self.tap_parameter(site, module, parameter)
            else:
                self.frozen.append(entry)

    def find_watched(self, name: str) -> SlotWatch:
        """The watch of a tensor that is watched by hand."""
        watch = self._watched.get(name)
        if watch is None:
            watch = self._watched[name] = SlotWatch(self._factory, None, WATCH + name, ())
            self.add_slot(watch)
        return watch

    @property
    def called(self) -> set[str]:
        """Paths of modules that were called while a step was recorded."""
        return {watch.path for watch in self.slots if watch.was_called}

    def remove(self) -> None:
        """Take every hook back."""
        self.regions.end()
        for module, arguments in self._inputs.items():
            unwatch_arguments(module, arguments)
        for module, watch in self._outputs.items():
            unwatch_forward(module, watch)
        for parameter in list(self.parameters.values()):
            parameter.remove()
        self._factory.remove()

    def tap_parameter(self, site: Site, module: nn.Module | None, parameter: torch.Tensor) -> None:
        """Record a parameter, one of no module among them, under this name, unless it has one already."""
        if id(parameter) in self.parameters:
            return
        make, buffer = self._factory.make_tensor_recorder, self._grad
        trains = _trains(parameter)
        watch = ParameterWatch(
            self._factory.backward,
            site,
            parameter,
            partial(_forget, weakref.ref(self), id(parameter)),
            value=make(buffer, module, site, copy=True),
            gradient=make(buffer, module, site.grad, copy=True) if trains else None,
            local=self._make_local(module, site) if trains else None,
            update=make(buffer, module, site.update) if trains else None,
        )
        if not trains:
            find_module = None if module is None else weakref.ref(module)
            self.frozen.append((site, find_module, WeakIdRef(parameter)))
        if watch.value or watch.gradient or watch.local or watch.update:
            self.parameters[id(parameter)] = watch
            self._factory.sees_gradients |= watch.gradient is not None
            self._adopt(watch)

    def see_accumulated(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record what several passes have left in ``.grad`` of those whose gradients are recorded."""
        for parameter in parameters:
            watch = self.parameters.get(id(parameter))
            gradient = gradient_of(parameter)
            if watch is None or watch.gradient is None or watch.gradient.row < 0 or gradient is None:
                continue
            site = accumulated_gradient(watch.site)
            try:
                if watch.accumulated is None:
                    row = self._factory.rows.number(site)
                    watch.accumulated = TensorRecorder(self._factory, self._grad, site, row, None, copy=True)
                watch.accumulated.see(read_unseen(gradient, own_values))
            except Exception as error:
                self._factory.events.fault(site, error)

    def meet_wrapper(self, wrapper: nn.Module) -> None:
        """Have parameters adopted by a wrapper that calls a model, if it reduces gradients and was not known."""
        if self._reductions.meet_wrapper(wrapper):
            for watch in list(self.parameters.values()):
                self._adopt(watch)

    def _adopt(self, watch: ParameterWatch) -> None:
        """Find out who else has a parameter, and who reduces its gradient."""
        self._reductions.adopt(watch)
        copies = watch.exchange.ranks if watch.exchange is not None else ()
        if watch.parameter is not None:
            self._factory.placements.see_parameter(watch.site, watch.parameter, copies)

    def _make_local(self, module: nn.Module | None, parameter: Site) -> TensorRecorder | None:
        if not (self._settings.names(LOCAL) and has_other_processes()):
            return None
        return self._factory.make_tensor_recorder(self._grad, module, local_gradient(parameter), copy=True)

    def _may_reach(self, entry: NamedModule, slot: str) -> bool:
        return any(self._settings.may_reach(each) for each in entry.candidates() if each.site.slot == slot)

    def add_slot(self, watch: SlotWatch) -> None:
        """Have one more watch of what has calls."""
        self.slots.append(watch)
        self.calls.append(watch.trained_calls)


def _forget(find_taps: weakref.ref[Taps], number: int, _: object) -> None:
    """Forget a parameter that is gone; its number may become that of another."""
    taps = find_taps()
    if taps is not None:
        taps.parameters.pop(number, None)
        taps.may_lack = True


def _trains(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and not is_lazy(parameter)
