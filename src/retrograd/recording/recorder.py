"""The recorder: sets the taps, keeps the clock, and hands what was seen to a sink."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.facts.facts import SOURCES, Facts
from retrograd.facts.source import MakeSource
from retrograd.history.sink import Event, EventKind, Moment, Sink
from retrograd.hooks.backward import (
    EngineRun,
    backward_followers,
    backward_listeners,
    has_asked_for_a_pass,
)
from retrograd.hooks.calls import count_calls
from retrograd.hooks.distributed import count_processes, is_rehearsal, running_stage
from retrograd.hooks.engine import at_end_of_backward, current_graph_task, is_compiling, is_tracing, is_transformed
from retrograd.hooks.faults import never_raise
from retrograd.hooks.input_gradient import InputGradient
from retrograd.hooks.names import (
    NamedModule,
    compiled_regions,
    describe_model,
    name_models,
    walk_modules,
)
from retrograd.hooks.nested import flatten
from retrograd.hooks.optimizer import optimizer_listeners
from retrograd.hooks.reach import FREE_DEPTH, DeepGraphGuard, find_leaves
from retrograd.hooks.rewriters import intervention_listeners
from retrograd.hooks.tables import Entry, hidden_hooks
from retrograd.notices import warn
from retrograd.progress.steps import Steps
from retrograd.recording.attribution import LateGradients
from retrograd.recording.clock import Clock
from retrograd.recording.emitter import Emitter
from retrograd.recording.faults import Faults
from retrograd.recording.intervention_watch import InterventionWatch
from retrograd.recording.manual_updates import ManualUpdates
from retrograd.recording.mode_buffer import ModeBuffer, ModeBuffers
from retrograd.recording.module_watch import SlotWatch, mode_now
from retrograd.recording.omissions import Evidence, Wishes, list_omissions, list_unmatched
from retrograd.recording.optimizer_watch import LooseParameters, OptimizerWatch
from retrograd.recording.parameter_watch import ParameterWatch, UpdateTap
from retrograd.recording.reductions import Reductions
from retrograd.recording.settings import Settings
from retrograd.recording.site_recorder import SiteRecorder
from retrograd.recording.site_table import Placements, RowTable
from retrograd.recording.taps import Taps
from retrograd.recording.tensor_keeper import TensorKeeper
from retrograd.sites.site import ROOT, WATCH, Site


class Recorder:
    """Records models into a sink until it is closed.

    Args:
        models: a module, or modules by name. Names lead the paths of their sites. None for what there is without one.
        sink: what is written to.
        settings: what is recorded of them, and when.
        step: number of the first step.
        loose: record tensors, too, that optimizers update and that belong to no model.
        sources: what makes the sources of facts.

    Raises:
        AttachError: for something that cannot be recorded.
        NoSuchSiteError: for a pattern that matches nothing.
    """

    def __init__(
        self,
        models: nn.Module | Mapping[str, nn.Module] | None,
        sink: Sink,
        settings: Settings | None = None,
        *,
        step: int = 0,
        loose: bool = False,
        sources: Sequence[MakeSource] = SOURCES,
    ) -> None:
        self.settings = settings or Settings()
        self._sink = sink
        self._structures: dict[str, list[dict[str, str | int]]] = {}
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._roots: WeakSet[nn.Module] = WeakSet()
        self._new_models = {} if models is None else name_models(models)
        check_models(models, self.settings)
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._wishes = Wishes(self.settings)
        self._faults = Faults()
        self._manual = ManualUpdates(())
        self._losses: tuple[torch.Tensor, ...] = ()
        self._scale: torch.Tensor | None = None
        self._in_backward = False
        self._closed = False
        self._processes = 1
        self._crowded: set[str] = set()
        self._buffers = ModeBuffers(self.settings)
        self._rows = RowTable(self._buffers, sink)
        self._old_input_gradients: list[InputGradient] = []
        self.keeper = TensorKeeper(self.settings.keeps, self.settings.tensor_budget, sink)
        self.guard = DeepGraphGuard()
        self.leaf_handles: list[Entry] = []
        self.input_gradients: list[InputGradient] = []
        self.placements = Placements(lambda found: sink.describe(placements=found))
        late = LateGradients()
        slots: list[SlotWatch] = []
        self._emitter = Emitter(sink, self._rows, slots, self.keeper, self, late, self.placements, self._forget_graph)
        self._steps = Steps()
        self.clock = Clock(self._wants_step, self._buffers, self._emitter, self._steps, self._manual.touched, step)
        self.clock.is_free = models is None
        self._taps = Taps(self, self.settings, self._buffers, self._rows, slots, late)
        self._reductions = Reductions(self)
        self._interventions = InterventionWatch(self, self._taps, self._emitter)
        self._optimizers = OptimizerWatch(self, self._steps, self._taps.parameters, UpdateTap(self._buffers.grad))
        self._loose = LooseParameters(self._taps, self._steps.knows, self._loose_found) if loose else None
        self._facts = Facts(self, sources)

    # ---- setting up -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Set the taps."""
        hidden_hooks.hold()
        try:
            for name, model in self._new_models.items():
                self._add(name, model)
        except BaseException:
            self._taps.remove()
            hidden_hooks.release()
            raise
        self._new_models.clear()
        backward_listeners.add(self)
        backward_followers.add(self)
        intervention_listeners.add(self._interventions)
        optimizer_listeners.add(self._optimizers)
        self._facts.begin()
        self._describe()

    def add_model(self, name: str, model: nn.Module) -> None:
        """Record one more model from now on."""
        name_models({name: model})
        self._add(name, model)
        self._describe()

    def add_root(self, module: nn.Module) -> None:
        """Take each call of this module for a forward of its own, as those of whole models are."""
        if module not in self._roots:
            self._roots.add(module)
            self._taps.tap_root(module, _RootWatch(self))

    def _add(self, name: str, model: nn.Module) -> None:
        entries = [entry for entry in walk_modules(name, model) if entry.module not in self._modules]
        self._structures[name] = describe_model(name, model)
        self._names[model] = name
        self._modules.update(entry.module for entry in entries)
        self._wishes.add(entries)
        self._interventions.add_modules(entries)
        self._manual.add(model.parameters())
        self.placements.add_model(model)
        self._reductions.add_model(model)
        self._steps.add_parameters(parameter for entry in entries for _, parameter in entry.parameters)
        compiled = compiled_regions(entries)
        if compiled:
            listed = ", ".join(region.removesuffix(".") or "the whole model" for region in compiled)
            self.note("note", text=f"compiled, so recorded at the boundary alone: {listed}")
        for entry in entries:
            if not entry.path.startswith(compiled) or entry.path == ROOT:
                self._taps.tap_calls(entry)
            self._taps.release_loose(entry)
            self._taps.tap_parameters(entry)
        self.add_root(model)
        self._facts.model_added(name, model)

    def make_site_recorder(self, buffer: ModeBuffer, module: nn.Module | None, site: Site) -> SiteRecorder | None:
        """The recorder of a site, or None when nothing of it is wanted."""
        return self._taps.make_site_recorder(buffer, module, site)

    def parameter_watched(self, watch: ParameterWatch) -> None:
        """A parameter is recorded from now on: who else has it, and who reduces its gradient?"""
        self._reductions.adopt(watch)
        copies = watch.exchange.ranks if watch.exchange is not None else ()
        if watch.parameter is not None:
            self.placements.see_parameter(watch.site, watch.parameter, copies)

    def optimizer_seen(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update, whatever it holds."""
        if self._loose is not None:
            self._loose.see(optimizer)

    def _loose_found(self, tensors: list[torch.Tensor]) -> None:
        self._steps.add_parameters(tensors)

    def _wants_step(self, step: int) -> bool:
        try:
            return bool(self.settings.schedule(step))
        except Exception as error:
            self.fault("schedule", error)
            return False

    # ---- forward ----------------------------------------------------------------------------------------------

    def watch(self, name: str, tensor: Any) -> None:
        """Record a tensor, or a nest of tensors, that user's code hands over."""
        try:
            self._taps.find_watched(name).see(tensor)
        except Exception as error:
            self.fault(Site(WATCH + name), error)

    @never_raise()
    def root_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called."""
        if current_graph_task() != -1 or self.clock.is_paused:  # a checkpointed part is computed again
            return
        if self.clock.outermost is None and is_rehearsal():
            self.clock.pause(id(model))
            return
        if self.guard.count > FREE_DEPTH and not _continues_a_graph(arguments):
            self.guard.part()
        clock = self.clock
        if clock.entered and not self._in_backward:
            clock.leave_backward(failed=True)  # a pass that we did not see begin has raised
        if clock.outermost is not None and not self._is_running(clock.outermost, model):
            clock.forward_left()
        self._meet_wrapper()
        if clock.outermost is None:
            self._find_stage(model)
        clock.forward_begins(id(model), mode_now(), model.training)
        self._steps.model_runs(model)
        if clock.is_outermost:
            self._facts.forward_begins(model, arguments)
        buffer = clock.waiting_buffer
        if buffer is not None:
            buffer.forwards.begin(id(model), model.training, buffer.serial)

    def _meet_wrapper(self) -> None:
        if self._reductions.meets_wrapper():
            for watch in list(self._taps.parameters.values()):
                self.parameter_watched(watch)

    @never_raise()
    def root_ends(self, model: nn.Module, output: Any, failed: bool) -> None:
        """That call has ended."""
        if self.clock.is_paused:
            self.clock.go_on(id(model))
        elif current_graph_task() == -1:
            buffer = self.clock.waiting_buffer
            if buffer is not None:
                buffer.forwards.end(output, self)
            if self.clock.is_outermost:
                self._facts.forward_ends(model, output, failed)
            self.guard.pause()
            self.clock.forward_ends(id(model), failed)

    def _find_stage(self, model: nn.Module) -> None:
        stage = running_stage()
        self.clock.is_piped = stage is not None
        if stage is not None:
            self.placements.set_stage(self._names.get(model, ""), stage)

    def _is_running(self, outermost: int, model: nn.Module) -> bool:
        root = next((each for each in self._roots if id(each) == outermost), None)
        return root is not None and count_calls(root) > (root is model)

    def crowded(self, site: Site) -> None:
        """Told at a site that has more calls than get records of their own."""
        if str(site) not in self._crowded:
            self._crowded.add(str(site))
            self.note("note", str(site), text="this and all further calls within a micro-batch are merged")

    # ---- backward ---------------------------------------------------------------------------------------------

    @never_raise()
    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """Told of every backward pass of the process; those of other threads are not ours."""
        if threading.get_ident() != self.clock.thread:
            return
        self._in_backward = True
        if self._loose is not None:
            self._loose.look()
        if self.clock.is_free:
            if not self._steps.has_leader:
                self._manual.look_at(find_leaves(roots))
            self.clock.begin_pass()
        self._scale = self._optimizers.scales.find(roots)
        if self.clock.on:
            self._losses = tuple(root.detach().clone() for root in roots if _is_loss(root))
            self._taps.tap_thawed()
            self._reductions.pass_begins()
        self._facts.backward_begins(roots)

    @never_raise()
    def backward_ends(self, failed: bool) -> None:
        """That pass has ended."""
        if threading.get_ident() != self.clock.thread:
            return
        self._finish_inputs(failed)
        clock = self.clock
        if clock.on and not failed:
            self._reductions.pass_ends()
        may_be_ours = self._buffers.grad.touched and (failed or not self._taps.see_gradients)
        if not clock.entered and clock.on and (may_be_ours or clock.is_free):
            self.enter_backward()
        self._in_backward = False
        if clock.entered:
            self._emitter.add_losses(clock.moment, self._losses, self._scale)
            self._leave_backward(failed)
        elif not clock.on:
            self._leave_backward(failed)
        self._losses, self._scale = (), None
        self._facts.backward_ends(failed)

    @never_raise()
    def run_begins(self, run: EngineRun) -> None:
        """Told of every run of the engine.

        One inside a pass that hands its gradients back (a Function that solves an equation backwards, say) is a
        computation of that Function's own. One that adds to ``.grad`` is a part of the pass: a checkpointed one.
        """
        if self._is_aside(run):
            self.clock.step_aside()

    @never_raise()
    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """That run has ended."""
        if self._is_aside(run):
            self.clock.come_back()

    def _is_aside(self, run: EngineRun) -> bool:
        is_ours = threading.get_ident() == self.clock.thread or not has_asked_for_a_pass()
        return run.is_nested and not run.accumulates and is_ours

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """What the gradients of the running pass are multiplied by; None for nothing."""
        return self._scale

    def enter_backward(self) -> bool:
        """The running pass has reached its first tap; returns whether it is recorded."""
        if is_compiling():  # compiled autograd traces hooks too
            return False
        try:
            if is_tracing() or not self.clock.enter_backward():
                return False
            self._emitter.scale = self._scale
            if not self._in_backward:
                at_end_of_backward(self._leave_backward)
        except Exception as error:
            self.fault("enter_backward", error)
        return self.clock.entered

    def _finish_inputs(self, failed: bool) -> None:
        """Hand on those gradients of inputs of which this pass has brought a part and will bring no more."""
        for gradient in self.input_gradients:
            if failed:
                gradient.drop()
            elif gradient.unfinished:
                gradient.finish()

    @never_raise()
    def _leave_backward(self, failed: bool = False) -> None:
        self._finish_inputs(failed)
        self.guard.restart()
        self.clock.leave_backward(failed)
        if not self._steps.has_leader:
            self._manual.remember()

    # ---- handing over -----------------------------------------------------------------------------------------

    @property
    def fact_step(self) -> int:
        """The step that a fact is of that is seen now."""
        return self.clock.coming

    @property
    def is_fact_recorded(self) -> bool:
        """Whether that step is recorded, as far as it is known."""
        clock = self.clock
        return clock.on and clock.coming == clock.step

    @property
    def fact_moment(self) -> Moment:
        """When a fact is of that is seen now."""
        clock = self.clock
        if clock.coming != clock.step:
            return Moment(clock.coming)
        return Moment(clock.step, clock.micro, clock.backward, clock.buffers.grad.phase)

    def _forget_graph(self) -> None:
        self._facts.drain()
        self.guard.restart()
        self._optimizers.decide()
        self._optimizers.scales.forget()
        self._old_input_gradients = self.input_gradients[:]
        self.input_gradients.clear()
        for handle in self.leaf_handles:
            handle.remove()
        self.leaf_handles.clear()

    def note(
        self,
        kind: EventKind,
        name: str = "",
        *,
        value: float = float("nan"),
        text: str = "",
        moment: Moment | None = None,
    ) -> None:
        """Something happened once."""
        try:
            self._sink.add_event(Event(moment or self.clock.moment, kind, name, value, text, time.time()))
        except Exception as error:
            self._faults.add("events", error)  # counted, but no event of its own

    def fault(self, site: Site | str, error: Exception) -> None:
        """An error of ours at a tap: said once, counted, and training goes on."""
        reason = self._faults.add(site, error)
        if reason:
            self.note("fault", str(site), text=reason)

    def _describe(self) -> None:
        self._processes = max(self._processes, count_processes())
        self._sink.describe(
            model=[row for structure in self._structures.values() for row in structure],
            processes=self._processes,
            **self.settings.describe(),
        )

    def flush(self) -> None:
        """Hand over what is complete, and wait until it can be read back."""
        if threading.get_ident() == self.clock.thread:
            self.clock.settle()
        self._sink.flush()

    def close(self, status: str = "finished", error: dict[str, Any] | None = None) -> None:
        """Take every hook away, hand over what is left, and close the sink. Calling it twice is harmless.

        Args:
            status: how it ended.
            error: by which exception, as :func:`retrograd.runs.ending.describe_exception` tells it.
        """
        if self._closed:
            return
        self._closed = True
        backward_listeners.remove(self)
        backward_followers.remove(self)
        intervention_listeners.remove(self._interventions)
        optimizer_listeners.remove(self._optimizers)
        self.clock.close_all()
        self._optimizers.decide()
        self._facts.end()
        self.clock.stop()
        self._reductions.remove()
        self._taps.remove()
        hidden_hooks.release()
        for gradient in (*self._old_input_gradients, *self.input_gradients):
            gradient.remove()
        self._old_input_gradients.clear()
        self.input_gradients.clear()
        self.keeper.finish(self.clock.moment)
        evidence = self._evidence()
        processes = max(self._processes, count_processes())
        self._sink.describe(
            not_recorded=list_omissions(evidence), faults=dict(self._faults.counts), processes=processes
        )
        if error is not None:
            self._tell_error(error)
        self._sink.close(status)
        unmatched = list_unmatched(evidence)
        if unmatched and status == "finished":  # else what has not come yet is no news
            warn(f"Nothing was recorded at {', '.join(unmatched)}: no site was called so while the model ran.")

    def find_path(self, module: Any) -> str | None:
        """The path of a recorded module; None for anything else."""
        return next((wish.path for wish in self._wishes.modules if wish.module is module), None)

    def _tell_error(self, error: dict[str, Any]) -> None:
        if error["in_backward"] and error["module"] is None:
            error = error | {"module": self._emitter.failed_at}
        name = error["node"] or error["module"] or ""
        self.note("error", name, text=f"{error['kind']}: {error['message']}")
        self._sink.describe(error=error)

    def _evidence(self) -> Evidence:
        return Evidence(
            wishes=self._wishes,
            recorded=self._rows.recorded,
            kept=self.keeper.names,
            called=self._taps.called,
            unreadable=self._faults.unreadable,
            uncopied=self._optimizers.tap.left_out | self._reductions.left_out,
            alone={
                str(each.site): each.exchange is not None for each in self._taps.parameters.values() if each.is_alone
            },
        )


def check_models(models: nn.Module | Mapping[str, nn.Module] | None, settings: Settings) -> Sequence[NamedModule]:
    """The modules of models that can be recorded with these settings.

    Raises:
        AttachError: for something that is not a module.
        NoSuchSiteError: for a pattern that matches nothing.
    """
    if models is None:  # nothing is known before it runs
        return []
    modules = [entry for name, model in name_models(models).items() for entry in walk_modules(name, model)]
    settings.check([candidate for entry in modules for candidate in entry.candidates()])
    return modules


class _RootWatch:
    """Tells the recorder when one of its models is called."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recorder.root_begins(module, (args, kwargs))

    def after_call(self, module: nn.Module, output: Any) -> None:
        self._recorder.root_ends(module, output, failed=output is None and sys.exc_info()[0] is not None)


def _continues_a_graph(arguments: Any) -> bool:
    return any(tensor.requires_grad and not tensor.is_leaf for _, tensor in flatten(arguments, ()))


def _is_loss(root: torch.Tensor) -> bool:
    is_plain = type(root) is torch.Tensor and not root.is_meta and not is_transformed(root)
    return is_plain and root.numel() == 1 and root.is_floating_point()
