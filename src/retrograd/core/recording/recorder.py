"""The recorder: sets the taps, follows backward passes, and hands what was seen to a sink."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.core.amounts import list_names
from retrograd.core.history.facts import MOST_OPTIMIZERS, Gap
from retrograd.core.history.sink import Moment, Sink
from retrograd.core.hooks.backward import backward_followers, backward_listeners
from retrograd.core.hooks.engine import without_transforms
from retrograd.core.hooks.listeners import SeeGradient, hidden_hooks, never_raise
from retrograd.core.hooks.module import put_readers_last
from retrograd.core.hooks.names import NamedModule, list_modules, list_swapped, name_models, walk_modules
from retrograd.core.hooks.nested import Keys
from retrograd.core.hooks.optimizer import call_listeners, held_by, optimizer_listeners
from retrograd.core.hooks.parts import modules_of, parameters_of
from retrograd.core.hooks.reach import find_leaves
from retrograd.core.hooks.rewriters import intervention_listeners
from retrograd.core.hooks.watched import unwatch_by_hand, watch_by_hand
from retrograd.core.identities import IdentitySet
from retrograd.core.notices import warn
from retrograd.core.plugins import find_provided
from retrograd.core.progress.steps import Steps
from retrograd.core.ranks.placements import is_sharded
from retrograd.core.ranks.processes import count_processes
from retrograd.core.ranks.stages import is_rehearsal, is_second_half
from retrograd.core.recording.budget import Budget
from retrograd.core.recording.clock import Clock, RecordedPass, is_loss
from retrograd.core.recording.deliveries import Deliveries
from retrograd.core.recording.emitter import Emitter
from retrograd.core.recording.fact_source import MakeSource
from retrograd.core.recording.facts import Facts
from retrograd.core.recording.function_watch import FunctionWatches
from retrograd.core.recording.intervention_watch import InterventionWatch
from retrograd.core.recording.keep import TensorKeeper
from retrograd.core.recording.late_taps import warn_of_compiled_code
from retrograd.core.recording.logged import add_taker, remove_taker
from retrograd.core.recording.mode_buffer import Mode, ModeBuffer, ModeBuffers
from retrograd.core.recording.module_watch import ModelWatch
from retrograd.core.recording.omissions import Coverage, RequestedSites, list_omissions, list_unmatched
from retrograd.core.recording.optimizer_watch import LooseParameters, OptimizerWatch
from retrograd.core.recording.parameter_watch import Reductions
from retrograd.core.recording.scalar_watch import ScalarWatch
from retrograd.core.recording.schedule import NamedSchedule, Overhead
from retrograd.core.recording.settings import Settings
from retrograd.core.recording.sink_log import EventLog, RowTable, SitePlacements
from retrograd.core.recording.site_recorder import RecorderFactory
from retrograd.core.recording.structure import count_parameters, describe_model
from retrograd.core.recording.taps import Taps
from retrograd.core.sites.pattern import describe_pattern, names_functions
from retrograd.core.sites.site import WATCH, Site

_threads: dict[int, int] = {}
"""Recorder → the thread in which it began; one without models leaves the passes of such a thread to that recorder."""

_AGAIN = 10.0
"""Seconds after which what has come of a budget is written again, for a process that is killed."""


def list_sources() -> Sequence[MakeSource]:
    """The sources of facts of every recording."""
    sources: Sequence[MakeSource] = find_provided("sources") or ()
    return sources


class Recorder:
    """Records models into a sink until it is closed.

    Args:
        models: a module, or modules by name. Names lead the paths of their sites. None for what there is without one.
        sink: what is written to.
        settings: what is recorded of them, and when.
        step: number of the first step.
        loose: record tensors, too, that optimizers update and that belong to no model.
        sources: what makes the sources of facts; those of every recording when left out.

    Attributes:
        settings: what is recorded.
        clock: says when it is.
        events: takes what happens once, and faults.

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
        sources: Sequence[MakeSource] | None = None,
    ) -> None:
        self.settings = settings = settings or Settings()
        self._sink = sink
        self._new_models = {} if models is None else name_models(models)
        check_models(models, settings)
        self._structures: dict[str, list[dict[str, str | int]]] = {}
        self._modules: IdentitySet[nn.Module] = IdentitySet()
        self._trained: IdentitySet[nn.Module] = IdentitySet()
        self._names_trained: set[str] = set()
        self._requested = RequestedSites(settings)
        self._processes = 1
        self._swapped: list[str] = []
        self._closed = False
        self._described = 0.0
        self._thread = threading.get_ident()
        self._lock = threading.RLock()
        self._beside: list[tuple[tuple[torch.Tensor, ...], torch.Tensor | None]] = []
        self.events = events = EventLog(sink)
        self.fault = events.fault
        self._steps = steps = Steps()
        self._buffers = buffers = ModeBuffers(settings)
        wanted = settings.schedule
        self._budget = events.budget = Budget(wanted, self._note_gap) if isinstance(wanted, Overhead) else None
        self.clock = clock = Clock(self._wants_step, buffers, self._hand_over, steps, step, self._may_want)
        clock.is_budgeted = self._budget is not None
        clock.is_free = models is None
        clock.is_apart = settings.per_forward
        events.clock = clock
        self._backward = RecordedPass(clock, steps, events.fault)
        keeper = TensorKeeper(settings.keeps, settings.tensor_budget, sink)
        self._factory = RecorderFactory(
            settings, buffers, RowTable(buffers, sink), keeper, SitePlacements(sink), events, self._backward
        )
        self._reductions = Reductions(self._backward)
        self._taps = Taps(self._factory, self._reductions)
        self._deliveries = deliveries = Deliveries(events.fault)
        self._facts = Facts(events, list_sources() if sources is None else sources, deliveries)
        self._functions = (
            FunctionWatches(self._factory, self._taps, self._facts.models)
            if FunctionWatches.are_named(settings.selections)
            else None
        )
        names = self._facts.optimizers
        find_name = partial(names.find, most=MOST_OPTIMIZERS)
        self._scalars = ScalarWatch(clock, events, find_name, sink.describe, deliveries, self._see_optimizer)
        self._emitter = Emitter(sink, self._factory, self._taps, self._scalars, deliveries)
        self._interventions = InterventionWatch(self._factory, self._emitter, self._facts.models)
        strangers = LooseParameters(self._taps, steps, self._facts.optimizers) if loose else None
        self._optimizers = OptimizerWatch(
            clock, events, steps, self._taps, buffers.grad, strangers, names, self._scalars, deliveries
        )
        self._models = ModelWatch(
            self._backward,
            steps,
            self._factory.placements,
            self._facts,
            self._scalars,
            self._taps.meet_wrapper,
            self._renew,
        )

    # ---- setting up -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Set the taps."""
        hidden_hooks.hold()
        try:
            for name, model in self._new_models.items():
                self._add(name, model)
        except BaseException:
            self._models.remove()
            self._taps.remove()
            hidden_hooks.release()
            raise
        self._new_models.clear()
        if self._functions is not None:
            self._functions.attach()
        backward_listeners.add(self)
        backward_followers.add(self._backward)
        intervention_listeners.add(self._interventions)
        optimizer_listeners.add(self._optimizers)
        call_listeners.add(self._scalars)
        add_taker(self)
        watch_by_hand(self)
        _threads[id(self)] = self._thread
        self._facts.begin()
        self._describe()

    def add_model(self, name: str, model: nn.Module) -> None:
        """Record one more model from now on; what it runs is of no step that is over."""
        name_models({name: model})
        if threading.get_ident() == self.clock.thread:
            self.clock.settle()
        self._add(name, model)
        self._describe()

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models that are still there, by name."""
        return dict(self._facts.models)

    def add_root(self, module: nn.Module) -> None:
        """Take each call of this module for a forward of its own, as those of whole models are."""
        self._models.add(module)

    def _add(self, name: str, model: nn.Module) -> None:
        entries = [entry for entry in walk_modules(name, model) if entry.module not in self._modules]
        self._structures[name] = describe_model(name, model)
        self._modules.update(entry.module for entry in entries)
        self._requested.add(entries)
        self._factory.placements.add_model(model)
        self._reductions.add_model(model)
        self._steps.add_parameters(parameter for entry in entries for _, parameter in entry.parameters)
        for entry in entries:
            self._taps.tap_outputs(entry)
            self._taps.tap_inputs(entry)
            self._taps.release_loose(entry)
            self._taps.tap_parameters(entry)
        late = self._taps.regions.find_late(entries)
        if late:
            warn_of_compiled_code(late)
        else:
            self._taps.expect(entries)
        self._models.add(model)
        self._facts.model_added(name, model)

    def _renew(self) -> None:
        """Record parameters that have come since, as where a model was sharded after it had been given."""
        if not self._taps.may_lack:
            return
        self._taps.may_lack = False
        for name, model in self._facts.models:
            entries = [
                replace(entry, parameters=new)
                for entry in walk_modules(name, model)
                if (new := tuple(each for each in entry.parameters if not self._steps.knows(each[1])))
            ]
            if entries:
                self._facts.name_parameters(name, model)
                self._structures[name] = describe_model(name, model)
                self._spread(model, entries)
                self._describe()

    def _spread(self, model: nn.Module, entries: Sequence[NamedModule]) -> None:
        new = [parameter for entry in entries for _, parameter in entry.parameters]
        if any(map(is_sharded, new)):
            self._factory.placements.add_model(model)
            self._reductions.add_model(model)
            for module in modules_of(model):
                put_readers_last(module)
        self._steps.add_parameters(new)
        for entry in entries:
            self._taps.release_loose(entry)
            self._taps.tap_parameters(entry)

    def _wants_step(self, step: int) -> bool:
        try:
            if self._budget is not None:
                return self._begin_budgeted(self._budget, step)
            return bool(self.settings.schedule(step))
        except Exception as error:
            self.fault("schedule", error)
            return False

    def _may_want(self, step: int) -> bool:
        if self._budget is not None:
            return self._budget.may_want(step)
        return not isinstance(self.settings.schedule, NamedSchedule) or self.settings.schedule(step)

    def _begin_budgeted(self, budget: Budget, step: int) -> bool:
        if not budget.has_begun:
            return budget.begin_step(step)
        if not self.clock.on:  # else all that there is has been handed over
            self._deliveries.deliver()
            self._emitter.emit_losses()
            self._drain()
        is_recorded = budget.begin_step(step)
        self.clock.measures_updates = budget.with_updates
        now = time.monotonic()
        if now - self._described > _AGAIN:
            self._describe_budget()
        return is_recorded

    def _note_gap(self, gap: Gap) -> None:
        self.events.note_fact(gap)
        self._describe_budget()

    @property
    def overhead(self) -> dict[str, Any] | None:
        """What has come of a budget for overhead, for the manifest; None without one."""
        if self._budget is None:
            return None
        has_updates = any(watch.update is not None for watch in self._taps.parameters.values())
        return self._budget.describe() | ({} if has_updates else {"updates": 0})

    def _describe_budget(self) -> None:
        if self._budget is not None:
            self._described = time.monotonic()
            self._sink.describe(overhead=self.overhead)

    # ---- recording --------------------------------------------------------------------------------------------

    def watch(self, name: str, tensor: Any) -> None:
        """Record a tensor, or a nest of tensors, that user's code hands over."""
        try:
            self._taps.find_watched(name).see(tensor)
        except Exception as error:
            self.fault(Site(WATCH + name), error)

    @never_raise()
    def log(self, numbers: Mapping[str, Any], step: int | None) -> None:
        """Record what the program has logged."""
        self._scalars.log(numbers, step)

    @never_raise()
    def _drain(self, *, is_last: bool = False) -> None:
        self._scalars.drain(is_last=is_last)

    @property
    def switch(self) -> Clock:
        """Holds whether there is anything to do for tensors that compiled code watches by hand."""
        return self.clock

    def see_in_compiled_code(
        self, tensors: Sequence[tuple[Keys, torch.Tensor]], trains: bool
    ) -> Sequence[SeeGradient | None]:
        """Record what compiled code watches by hand; the first of the keys is its name."""
        if not self.is_of_this_thread():
            return ()
        name = tensors[0][0][0]
        try:
            watch = self._taps.find_watched(name)
            return watch.see_in_compiled_code([(keys[1:], tensor) for keys, tensor in tensors], trains)
        except Exception as error:
            self.fault(Site(WATCH + name), error)
            return ()

    def is_of_this_thread(self) -> bool:
        """True if the recorded models run in the thread that asks, or if there are none and it has no other."""
        here = threading.get_ident()
        is_open = self.clock.is_free and here not in _threads.values()
        return is_open or here in (self._thread, self.clock.thread)

    @never_raise()
    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """Begin a pass, unless it is for the shapes alone, or another thread runs it while models are recorded."""
        if is_rehearsal():
            return
        if not self.clock.is_free:
            if threading.get_ident() == self.clock.thread:
                self._begin_pass(roots)
            return
        with self._lock:  # passes of any thread
            if not self.is_of_this_thread():
                return
            if not self._backward.is_running:
                self.clock.thread = threading.get_ident()
                self._begin_pass(roots)
            elif threading.get_ident() != self.clock.thread:
                losses = tuple(root.detach().clone() for root in roots if is_loss(root))
                self._beside.append((losses, self._optimizers.scales.find(roots)))

    def _begin_pass(self, roots: tuple[torch.Tensor, ...]) -> None:
        clock, backward = self.clock, self._backward
        backward.is_running = True
        clock.is_second_half = clock.is_piped and is_second_half()
        self._optimizers.pass_begins()
        if self._functions is not None:
            self._functions.pass_begins()
        if clock.is_free:
            if not self._steps.has_leader:
                self._steps.pass_begins(find_leaves(roots))
            clock.begin_pass()
        backward.begin(roots, self._optimizers.scales.find(roots))
        self._scalars.evaluations.pass_begins(roots)
        if clock.on:
            if self._taps.frozen:
                self._taps.tap_thawed()
            if self._reductions.groups:
                self._reductions.pass_begins()
        self._facts.backward_begins(roots)

    @never_raise()
    def backward_ends(self, failed: bool) -> None:
        """End the pass."""
        if threading.get_ident() != self.clock.thread or is_rehearsal():
            return
        if not self.clock.is_free:
            self._end_pass(failed)
            return
        with self._lock:
            self._end_pass(failed)
            beside, self._beside = self._beside, []
            for losses, scale in beside:
                self._add_pass(losses, scale)

    def _end_pass(self, failed: bool) -> None:
        clock, backward = self.clock, self._backward
        if self._functions is not None:
            self._functions.pass_ends()
        backward.finish_inputs(failed)
        if self._reductions.groups and clock.on and not failed:
            self._reductions.pass_ends()
        if clock.on and not clock.entered and (clock.is_free or self._may_be_ours(failed)):
            backward.enter()
        clock.is_second_half = False
        backward.is_running = False
        if clock.entered or clock.may_have_passed:
            moment = clock.moment if clock.entered else Moment(clock.step, clock.micro, 0)
            self._emitter.add_losses(moment, backward.losses, backward.scale)
            self._scalars.pass_ends(backward.scale)
        if clock.entered or not clock.on:
            backward.leave(failed)
        backward.losses, backward.scale = (), None
        self._facts.backward_ends(failed)
        if clock.on and self._taps.unseen:
            self._taps.tell_of_missing()

    def _add_pass(self, losses: tuple[torch.Tensor, ...], scale: torch.Tensor | None) -> None:
        """Add a pass that another thread began beside the one that has ended, as far as is known: its losses."""
        clock = self.clock
        clock.begin_pass()
        if clock.on and clock.enter_backward():
            self._emitter.add_losses(clock.moment, losses, scale)
        self._backward.leave()

    def _may_be_ours(self, failed: bool) -> bool:
        """Return whether the pass that ends may have reached what was recorded, where no gradient has told."""
        grad = self._buffers.grad
        return (failed and grad.touched) or (not self._factory.sees_gradients and grad.may_be_reached)

    # ---- handing over -----------------------------------------------------------------------------------------

    @never_raise()
    def _hand_over(self, buffer: ModeBuffer, moment: Moment, is_closing: bool) -> None:
        """Emit what a buffer holds, which is complete."""
        with without_transforms():  # the next forward may run in one
            self._deliveries.deliver()
            self._emitter.emit(buffer, moment, is_closing)
            if is_closing and buffer.mode is Mode.GRAD:
                self._facts.drain()
                self._optimizers.forget_losses()
                self._scalars.drain()
                self._backward.forget_graph()

    def _see_optimizer(self, optimizer: Optimizer) -> None:
        held = set(map(id, held_by(optimizer)))
        for name, model in self._facts.models:
            if any(id(each) in held for each in parameters_of(model)):
                self._trained.add(model)
                self._names_trained.add(name)
        self._describe()

    def _describe(self) -> None:
        models = list(self._trained) or [model for _, model in self._facts.models]
        if models:
            self._sink.describe(parameters=count_parameters(models))
        self._processes = max(self._processes, count_processes())
        self._sink.describe(
            model=[row for name in self._list_names() for row in self._structures[name]],
            processes=self._processes,
            **self.settings.describe(),
        )

    def _list_names(self) -> list[str]:
        """The names of the models, those that are trained first."""
        return sorted(self._structures, key=lambda name: name not in self._names_trained)

    def flush(self) -> None:
        """Hand over what is complete, and wait until it can be read back."""
        if threading.get_ident() == self.clock.thread:
            self.clock.settle()
            self._drain()
            self._deliveries.deliver(wait=True)
        self._sink.flush()

    def close(self, status: str = "finished", error: dict[str, Any] | None = None) -> None:
        """Take every hook away, hand over what is left, and close the sink. Calling it twice is harmless.

        Args:
            status: how it ended.
            error: by which exception, as :func:`retrograd.core.runs.ending.describe_exception` tells it.
        """
        if self._closed:
            return
        self._closed = True
        self.events.budget = None  # no step comes that it could choose
        if self._budget is not None:
            self._budget.end(was_made=self.clock.is_over or self.clock.was_reached)
        backward_listeners.remove(self)
        backward_followers.remove(self._backward)
        intervention_listeners.remove(self._interventions)
        optimizer_listeners.remove(self._optimizers)
        call_listeners.remove(self._scalars)
        self._scalars.evaluations.forward_begins()
        remove_taker(self)
        unwatch_by_hand(self)
        _threads.pop(id(self), None)
        self.clock.close_all()
        self._emitter.emit_losses()
        self._optimizers.decide()
        self._optimizers.updates.release()
        self._drain(is_last=True)
        self._deliveries.deliver(wait=True)
        self._describe_budget()
        self._facts.end()
        self.clock.stop()
        self._reductions.remove()
        self._find_swapped()
        self._models.remove()
        if self._functions is not None:
            self._functions.remove()
        self._taps.remove()
        hidden_hooks.release()
        self._backward.remove()
        self._factory.keeper.finish(self.clock.moment)
        coverage = self._coverage()
        processes = max(self._processes, count_processes())
        self._sink.describe(not_recorded=list_omissions(coverage), faults=dict(self.events.faults), processes=processes)
        if error is not None:
            self._tell_error(error)
        self._sink.close(status)
        has_seen = self._functions is not None and bool(self._functions.paths)
        unmatched = list_unmatched(coverage, was_run=has_seen)
        if unmatched and status == "finished":  # else it may still have come
            named = next(filter(names_functions, unmatched), None)
            hint = f" {self._functions.explain(named)}" if self._functions is not None and named is not None else ""
            names = ", ".join(map(describe_pattern, unmatched))
            warn(f"Nothing was recorded at {names}: no site matched while the model ran.{hint}")
        if self._swapped:
            warn(
                f"At {list_names(self._swapped)} a recorded module was replaced: what the "
                "new one returns was not recorded, nor its gradient. Begin a recording after such a change."
            )

    @never_raise()
    def _find_swapped(self) -> None:
        now = list_modules(self._facts.models)
        self._swapped = list_swapped(((each.path, each.module) for each in self._requested.modules), now)
        if self._swapped:
            self._structures |= {name: describe_model(name, model) for name, model in self._facts.models}
        if any(True for _ in self._facts.models):
            self._describe()

    def find_path(self, module: Any) -> str | None:
        """The path of a recorded module; None for anything else."""
        return self._facts.models.path_of(module)

    def _tell_error(self, error: dict[str, Any]) -> None:
        if error["in_backward"] and error["module"] is None:
            error = error | {"module": self._emitter.failed_at}
        name = error["node"] or error["module"] or ""
        self.events.note("error", name, text=f"{error['kind']}: {error['message']}")
        self._sink.describe(error=error)

    def _coverage(self) -> Coverage:
        watches = self._taps.parameters.values()
        return Coverage(
            requested=self._requested,
            swapped=self._swapped,
            recorded=self._factory.rows.recorded,
            kept=self._factory.keeper.names,
            called=self._taps.called,
            unreadable=self.events.unreadable,
            uncopied=self._optimizers.updates.left_out | self._reductions.left_out,
            summands=self._factory.placements.summands,
            nodes=self._functions.nodes if self._functions is not None else {},
            alone={str(each.site): each.exchange is not None for each in watches if each.is_alone},
        )


def check_models(models: nn.Module | Mapping[str, nn.Module] | None, settings: Settings) -> Sequence[NamedModule]:
    """The modules of models that can be recorded with these settings.

    Raises:
        AttachError: for something that is not a module.
        NoSuchSiteError: for a pattern that matches nothing.
    """
    if models is None:  # nothing is known before it runs
        return []
    modules = list_modules(name_models(models).items())
    settings.check([candidate for entry in modules for candidate in entry.candidates()])
    return modules
