"""The recorder: sets the taps, keeps the clock, and hands what was seen to a sink."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from retrograd.history.sink import Event, EventKind, Moment, RowBatch, Sink
from retrograd.hooks.backward import listen_to_backward, unlisten_to_backward
from retrograd.hooks.deep_graphs import DeepGraphGuard
from retrograd.hooks.engine import at_end_of_backward
from retrograd.hooks.module import CallTap, unwatch_forward, watch_forward
from retrograd.hooks.node import InputGradient
from retrograd.hooks.optimizer import listen_to_optimizers, unlisten_to_optimizers
from retrograd.recording.argument_watch import ArgumentWatch
from retrograd.recording.candidates import NamedModule, describe_model, name_models, walk_modules
from retrograd.recording.clock import Clock
from retrograd.recording.faults import Faults
from retrograd.recording.keep import find_keep
from retrograd.recording.lane import Lane, Lanes, Mode
from retrograd.recording.manual_updates import ManualUpdates
from retrograd.recording.module_watch import OutputWatch, SlotWatch, mode_now
from retrograd.recording.parameter_watch import ParameterWatch
from retrograd.recording.place import Place
from retrograd.recording.settings import Settings
from retrograd.recording.stream import NO_ROW, Stream
from retrograd.recording.tensor_keeper import TensorKeeper
from retrograd.recording.updates import UpdateTap
from retrograd.sites.selection import Candidate
from retrograd.sites.site import WATCH, Site


class Recorder:
    """Records models into a sink until it is closed.

    Args:
        models: a module, or modules by name. Names lead the paths of their sites.
        sink: what is written to.
        settings: what is recorded of them, and when.
        step: number of the first step.

    Raises:
        AttachError: for something that cannot be recorded.
        NoSuchSiteError: for a pattern that matches nothing.
    """

    def __init__(
        self, models: nn.Module | Mapping[str, nn.Module], sink: Sink, settings: Settings | None = None, *, step: int = 0
    ) -> None:
        self.settings = settings or Settings()
        self._sink = sink
        self._models = name_models(models)
        self._modules = check_models(self._models, self.settings)
        self._rows: dict[Site, int] = {}
        self._names: list[str] = []
        self._lanes = Lanes(self.settings)
        self._keeper = TensorKeeper(self.settings.keeps, self.settings.tensor_budget, sink)
        self._faults = Faults()
        self._manual = ManualUpdates(p for model in self._models.values() for p in model.parameters())
        self._updates = UpdateTap(self._lanes.grad)
        self._taps: list[CallTap] = []
        self._outputs: dict[nn.Module, OutputWatch] = {}
        self._parameters: dict[int, ParameterWatch] = {}
        self._watched: dict[str, SlotWatch] = {}
        self._places: list[Place] = []
        self._losses: list[tuple[Moment, torch.Tensor]] = []
        self._pending_losses: tuple[torch.Tensor, ...] = ()
        self._scale: tuple[int, torch.Tensor] | None = None
        self._ours: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._in_backward = False
        self._closed = False
        self.guard = DeepGraphGuard()
        self.leaf_handles: list[RemovableHandle] = []
        self.input_gradients: list[InputGradient] = []
        self.clock = Clock(self.settings.schedule, self._lanes, self._emit, self._manual.touched, step)

    # ---- setting up -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Set the taps."""
        for model in self._models.values():
            self._taps.append(CallTap(model, _RootWatch(self)))
        for entry in self._modules:
            self._tap(entry)
        listen_to_backward(self)
        listen_to_optimizers(self)
        self._describe()

    def add_model(self, name: str, model: nn.Module) -> None:
        """Record one more model from now on."""
        models = {**self._models, **name_models({name: model})}
        known = set(self._outputs) | {entry.module for entry in self._modules}
        entries = [entry for entry in walk_modules(name, model) if entry.module not in known]
        self._models = models
        self._ours.clear()
        self._modules += entries
        self._manual = ManualUpdates(p for each in models.values() for p in each.parameters())
        self._taps.append(CallTap(model, _RootWatch(self)))
        for entry in entries:
            self._tap(entry)
        self._describe()

    def _tap(self, entry: NamedModule) -> None:
        module, path = entry.module, entry.path
        if entry.is_called and self._may_reach(Site(path, ("output",)), module):
            watch = self._outputs[module] = OutputWatch(self, module, path, ("output",))
            watch_forward(module, watch)
        if entry.is_called and self._reaches_input(entry):
            self._taps.append(CallTap(module, ArgumentWatch(self, module, path)))
        for name, parameter in entry.parameters:
            self._tap_parameter(Site(path, (name,)), module, parameter)

    def _tap_parameter(self, site: Site, module: nn.Module, parameter: nn.Parameter) -> None:
        if id(parameter) in self._parameters:
            return
        lane = self._lanes.grad
        trains = parameter.requires_grad
        watch = ParameterWatch(
            self,
            parameter,
            value=self._make_stream(lane, module, site, copy=True),
            gradient=self._make_stream(lane, module, site.grad, copy=True) if trains else None,
            update=self._make_stream(lane, module, Site(site.path, site.keys, quantity="update")) if trains else None,
        )
        if watch.value or watch.gradient or watch.update:
            self._parameters[id(parameter)] = watch

    def _may_reach(self, site: Site, module: nn.Module) -> bool:
        return any(self.settings.may_reach(Candidate(each, module)) for each in (site, site.grad))

    def _reaches_input(self, entry: NamedModule) -> bool:
        return any(
            self.settings.may_reach(candidate) for candidate in entry.candidates() if candidate.site.slot == "input"
        )

    def make_place(self, lane: Lane, module: nn.Module | None, site: Site) -> Place | None:
        """The place for a site, or None when neither its value nor its gradient is wanted."""
        value = self._make_stream(lane, module, site)
        gradient = self._make_stream(lane, module, site.grad) if lane.mode is Mode.GRAD else None
        if value is None and gradient is None:
            return None
        place = Place(self, value, gradient)
        self._places.append(place)
        return place

    def _make_stream(self, lane: Lane, module: nn.Module | None, site: Site, *, copy: bool = False) -> Stream | None:
        candidate = Candidate(site, module)
        row = self._row(site) if self.settings.wants_statistics(candidate) else NO_ROW
        keep = find_keep(self.settings.keeps, candidate)
        return Stream(lane, site, row, keep, copy=copy) if row >= 0 or keep is not None else None

    def _row(self, site: Site) -> int:
        row = self._rows.get(site)
        if row is None:
            row = self._rows[site] = self._lanes.add_row()
            self._names.append(str(site))
            self._sink.add_sites([str(site)])
        return row

    # ---- forward ----------------------------------------------------------------------------------------------

    def watch(self, name: str, tensor: Any) -> None:
        """Record a tensor, or a nest of tensors, that user's code hands over."""
        watch = self._watched.get(name)
        if watch is None:
            watch = self._watched[name] = SlotWatch(self, None, WATCH + name, ())
        try:
            watch.see(tensor)
        except Exception as error:
            self.fault(Site(WATCH + name), error)

    def root_begins(self, model: nn.Module) -> None:
        """A recorded model is called."""
        if self.clock.entered and not self._in_backward:
            self.clock.leave_backward()  # a pass that we did not see begin has raised
        self.clock.forward_begins(id(model), mode_now(), model.training)

    def root_ends(self, model: nn.Module, failed: bool) -> None:
        """That call has ended."""
        self.clock.forward_ends(id(model), failed)

    # ---- backward ---------------------------------------------------------------------------------------------

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """Told of every backward pass of the process; those of other threads are not ours."""
        if threading.get_ident() == self.clock.thread:
            self._in_backward = True
            if self.clock.on:
                self._pending_losses = tuple(root.detach() for root in roots if root.numel() == 1)

    def backward_ends(self, failed: bool) -> None:
        """That pass has ended."""
        if threading.get_ident() != self.clock.thread:
            return
        self._in_backward = False
        clock = self.clock
        if not clock.entered and clock.on and self._lanes.grad.touched and not self._sees_gradients:
            clock.enter_backward()
        if clock.entered:
            self._losses += [(clock.moment, loss) for loss in self._pending_losses]
            self._leave_backward()
        elif not clock.on:
            clock.leave_backward()
        self._pending_losses = ()

    def enter_backward(self) -> bool:
        """The running pass has reached its first tap; returns whether it is recorded."""
        if not self.clock.enter_backward():
            return False
        if not self._in_backward:
            at_end_of_backward(self._leave_backward)
        return True

    def _leave_backward(self) -> None:
        for gradient in self.input_gradients:
            if gradient.unfinished:
                gradient.finish()
        self.clock.leave_backward()
        self._manual.remember()

    @property
    def _sees_gradients(self) -> bool:
        return bool(self._parameters) or any(place.wants_gradient for place in self._places)

    # ---- updates ----------------------------------------------------------------------------------------------

    def update_begins(self, optimizer: Optimizer) -> None:
        """Told of every update of the process."""
        if self.clock.on:
            watches = [self._parameters[id(p)] for p in _parameters_of(optimizer) if id(p) in self._parameters]
            self._updates.begin(optimizer, watches)

    def update_ends(self, optimizer: Optimizer) -> None:
        """The parameters have been changed."""
        self._updates.end(optimizer)
        if self._is_ours(optimizer):
            self._note("update", type(optimizer).__name__)
            self.clock.update_made(id(optimizer))

    def update_skipped(self, optimizer: Optimizer) -> None:
        """Loss scaling left the parameters alone; the step counts all the same, so that it can be seen."""
        self._updates.abandon(optimizer)
        if self._is_ours(optimizer):
            self._note("skipped", type(optimizer).__name__, text="loss scaling found a gradient that is not finite")
            self.clock.update_made(id(optimizer))

    def loss_scaled(self, scale: torch.Tensor) -> None:
        """Gradients of the coming pass are ``scale`` times too large."""
        if self.clock.on and threading.get_ident() == self.clock.thread:
            self._scale = (self._lanes.grad.serial, scale)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        ours = self._ours.get(optimizer)
        if ours is None:
            known = {id(parameter) for entry in self._modules for _, parameter in entry.parameters}
            ours = self._ours[optimizer] = any(id(parameter) in known for parameter in _parameters_of(optimizer))
        return ours

    # ---- handing over -----------------------------------------------------------------------------------------

    def _emit(self, lane: Lane, moment: Moment) -> None:
        try:
            scale = self._loss_scale(lane, moment)
            if lane.mode is Mode.GRAD:
                self._emit_losses(scale)
            custom = lane.custom.drain() if lane.custom is not None else {}
            for slab in lane.slabs.values():
                rows, bins = slab.drain()
                if rows:
                    self._sink.add_rows(RowBatch(moment, rows, bins, scale, custom))
                    custom = {}
                    if self._keeper.has_triggers:
                        self._keeper.pull_triggers(moment, self._names, rows)
            if lane.kept:
                self._keeper.take(moment, lane.kept, scale)
                lane.kept.clear()
            if lane.mode is Mode.GRAD:
                self._forget_graph()
        except Exception as error:
            self.fault(Site("self", ("output",)), error)

    def _loss_scale(self, lane: Lane, moment: Moment) -> float:
        """What the gradients of the micro-batch that is being emitted were multiplied by."""
        if self._scale is None or self._scale[0] != lane.serial or lane.mode is not Mode.GRAD:
            return 1.0
        scale = float(self._scale[1])
        self._note("scale", value=scale, moment=moment)
        return scale

    def _emit_losses(self, scale: float) -> None:
        for moment, loss in self._losses:
            self._note("loss", value=float(loss) / scale, moment=moment)
        self._losses.clear()

    def _forget_graph(self) -> None:
        self.guard.restart()
        self.input_gradients.clear()
        for handle in self.leaf_handles:
            handle.remove()
        self.leaf_handles.clear()

    def _note(
        self, kind: EventKind, name: str = "", *, value: float = float("nan"), text: str = "", moment: Moment | None = None
    ) -> None:
        self._sink.add_event(Event(moment or self.clock.moment, kind, name, value, text, time.time()))

    def fault(self, site: Site, error: Exception) -> None:
        """An error of ours at a tap: said once, counted, and training goes on."""
        if self._faults.add(str(site), error):
            self._note("fault", str(site), text=self._faults.reasons[str(site)])

    def _describe(self) -> None:
        self._sink.describe(
            model=[row for name, model in self._models.items() for row in describe_model(name, model)],
            **self.settings.describe(),
        )

    def flush(self) -> None:
        """Hand over what is complete, and wait until it can be read back."""
        self._sink.flush()

    def close(self, status: str = "finished") -> None:
        """Take every hook away, hand over what is left, and close the sink. Calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        unlisten_to_backward(self)
        unlisten_to_optimizers(self)
        self.clock.close_all()
        self.clock.stop()
        for tap in self._taps:
            tap.remove()
        for module, watch in self._outputs.items():
            unwatch_forward(module, watch)
        for parameter in self._parameters.values():
            parameter.remove()
        for place in self._places:
            place.remove()
        self._keeper.finish(self.clock.moment)
        self._sink.describe(not_recorded=self._not_recorded(), faults=dict(self._faults.counts))
        self._sink.close(status)

    def _not_recorded(self) -> list[dict[str, str]]:
        return []


def check_models(models: nn.Module | Mapping[str, nn.Module], settings: Settings) -> list[NamedModule]:
    """The modules of models that can be recorded with these settings.

    Raises:
        AttachError: for something that is no module.
        NoSuchSiteError: for a pattern that matches nothing.
    """
    modules = [entry for name, model in name_models(models).items() for entry in walk_modules(name, model)]
    settings.check([candidate for entry in modules for candidate in entry.candidates()])
    return modules


class _RootWatch:
    """Tells the recorder when one of its models is called."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recorder.root_begins(module)

    def after_call(self, module: nn.Module, output: Any) -> None:
        self._recorder.root_ends(module, failed=output is None and sys.exc_info()[0] is not None)


def _parameters_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])

