"""The updates of optimizers: measured, told to the clock and noted; and what they update outside of the models.

An update is measured by a copy of the weights, which stands while ``step`` runs, and no longer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, compress
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.core.history.facts import MOST_OPTIMIZERS
from retrograd.core.history.sink import ENDS_NONE, Moment
from retrograd.core.hooks.dispatch import carry_out_unseen, read_unseen
from retrograd.core.hooks.engine import count_function_modes, is_tracing, without_functions
from retrograd.core.hooks.listeners import never_raise
from retrograd.core.hooks.names import parameter_site
from retrograd.core.hooks.optimizer import OptimizerNames, held_by, list_optimizers
from retrograd.core.identities import IdentityDict
from retrograd.core.limits import LIMITS
from retrograd.core.progress.steps import LossScales, Steps
from retrograd.core.ranks.placements import own_values
from retrograd.core.recording.clock import Clock, Fault
from retrograd.core.recording.deliveries import Deliveries, is_far
from retrograd.core.recording.mode_buffer import ModeBuffer
from retrograd.core.recording.parameter_watch import ParameterWatch
from retrograd.core.recording.scalar_watch import ScalarWatch
from retrograd.core.recording.sink_log import EventLog
from retrograd.core.recording.site_recorder import TensorRecorder
from retrograd.core.recording.taps import Taps
from retrograd.core.recording.weight_changes import WeightChanges
from retrograd.core.sites.site import OPTIMIZER, Site
from retrograd.core.statistics.slab import copy_elements, observe_updates


class LooseParameters:
    """Taps what optimizers hold, under ``optimizer/CLASS:GROUP.INDEX`` or the name that the optimizer was given.

    A second optimizer of the same class is ``CLASS_2``, in facts and findings, too. Those that are there
    when the first backward pass begins are looked at then, when the models that have run are known and what is left is
    loose; later ones when they update.

    Args:
        taps: sets the hooks.
        steps: knows the parameters of recorded models, and is notified of those that are tapped.
        names: those of the optimizers.
    """

    def __init__(self, taps: Taps, steps: Steps, names: OptimizerNames) -> None:
        self._taps = taps
        self._steps = steps
        self._has_looked = False
        self._names = names
        self._groups: IdentityDict[Optimizer, int] = IdentityDict()

    def look(self) -> None:
        """Inspect all optimizers that exist, once, when the first backward pass begins."""
        if not self._has_looked:
            self._has_looked = True
            for optimizer in list_optimizers():
                self.see(optimizer)

    def see(self, optimizer: Optimizer) -> None:
        """Tap what is new in an optimizer that is about to update."""
        if self._groups.get(optimizer) == len(optimizer.param_groups):
            return
        self._groups[optimizer] = len(optimizer.param_groups)
        loose = [each for each in _list(optimizer) if not self._steps.knows(each[1])]
        for keys, tensor in loose:
            self._taps.tap_parameter(Site(f"{OPTIMIZER}{self._names.find(optimizer)}", keys), None, tensor)
        self._steps.add_parameters([tensor for _, tensor in loose])


def _list(optimizer: Optimizer) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The keys and the tensor of each parameter."""
    for number, group in enumerate(optimizer.param_groups):
        for index, tensor in enumerate(group["params"]):
            yield _make_keys(group, number, index), tensor


def _make_keys(group: Mapping[str, Any], number: int, index: int) -> tuple[str, ...]:
    names = group.get("param_names")  # of an optimizer that was made of named parameters
    if not names:
        return str(number), str(index)
    first, *rest = str(names[index]).split(".")
    return (*parameter_site(OPTIMIZER, first).keys, *rest)


class WeightCopies:
    """Copies of weights, made before an update and given back after it.

    Memory that comes from the system page by page costs several times what the copying does. So the memory of copies on
    the CPU waits for the next update of the same optimizer, as long as all that waits is little. What the kernel can
    read is copied by it, in one call for all.
    """

    def __init__(self) -> None:
        self._waiting: IdentityDict[Optimizer, list[bytearray | None]] = IdentityDict()

    def take(
        self, optimizer: Optimizer, plain: list[torch.Tensor | None], weights: list[torch.Tensor]
    ) -> list[torch.Tensor | bytearray]:
        """Copy the weights of an optimizer, those that the kernel is to read as ``plain`` ones."""
        copies = copy_elements(plain, self._waiting.pop(optimizer, []))
        if all(copies):  # no copy is empty
            return cast("list[torch.Tensor | bytearray]", copies)
        others = copy_together([weight for weight, copy in zip(weights, copies, strict=True) if copy is None])
        return [next(others) if copy is None else copy for copy in copies]

    def give_back(self, optimizer: Optimizer, copies: list[torch.Tensor | bytearray]) -> None:
        """Give copies back that are not read any more."""
        room = LIMITS.waiting_bytes - sum(
            len(each) for waiting in self._waiting.values() for each in waiting if each is not None
        )
        if set(map(type, copies)) == {bytearray} and sum(map(len, copies)) <= room:  # as nearly always
            self._waiting[optimizer] = cast("list[bytearray | None]", copies)
            return
        waiting: list[bytearray | None] = []
        for copy in copies:
            stays = isinstance(copy, bytearray) and len(copy) <= room
            waiting.append(copy if isinstance(copy, bytearray) and stays else None)
            room -= len(copy) if stays else 0
        self._waiting[optimizer] = waiting


def copy_together(weights: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Copies of weights, those on a device by one call, and each at an address that kernels like."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for weight in weights:
        if _is_joined(weight):
            groups.setdefault((weight.device, weight.dtype), []).append(weight)
    pieces = {key: iter(carry_out_unseen(partial(_join, same))) for key, same in groups.items()}
    for weight in weights:
        if _is_joined(weight):
            yield next(pieces[weight.device, weight.dtype])
        else:
            yield read_unseen(weight, _copy)


def _join(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    flat = [each.detach().view(-1) for each in weights]
    pieces = torch.cat(flat).split([each.numel() for each in flat])
    return [piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True)]


def _copy(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().clone()


def _is_joined(weight: torch.Tensor) -> bool:
    plain = type(weight) in (nn.Parameter, torch.Tensor) and weight.layout is torch.strided
    return plain and is_far(weight) and weight.is_contiguous() and weight.nbytes % 16 == 0


class _UpdatePlan(NamedTuple):
    """What is recorded of the parameters of one optimizer: the same at every update, until others have a watch.

    Attributes:
        watches: for each parameter its watch, or None.
        values: those whose value is recorded, by their places among the parameters, and where it goes.
        places: of those whose update is recorded.
        recorders, rows: where each of these goes.
        keeps: whether some of these are kept as tensors.
    """

    watches: list[ParameterWatch | None]
    values: list[tuple[int, TensorRecorder]]
    places: list[int]
    recorders: list[TensorRecorder]
    rows: list[int]
    keeps: bool


def _make_plan(watches: list[ParameterWatch | None]) -> _UpdatePlan:
    there = [(place, watch) for place, watch in enumerate(watches) if watch is not None]
    values = [(place, watch.value) for place, watch in there if watch.value is not None]
    updates = [(place, watch.update) for place, watch in there if watch.update is not None]
    recorders = [recorder for _, recorder in updates]
    rows = [recorder.row for recorder in recorders]
    keeps = any(recorder.keep is not None for recorder in recorders)
    return _UpdatePlan(watches, values, [place for place, _ in updates], recorders, rows, keeps)


class _BegunUpdate(NamedTuple):
    """An update that is under way: where each part goes, what is updated, and copies of it from before."""

    recorders: list[TensorRecorder]
    rows: list[int]
    parameters: list[torch.Tensor]
    copies: list[torch.Tensor | bytearray]


class UpdateRecorder:
    """Measures the updates of the optimizers that step now.

    Args:
        buffer: where they are recorded.
        fault: takes faults.
        changes: is given the sums of bits of weights that were measured.

    Attributes:
        left_out: printed sites of updates that were left out for their size.
    """

    def __init__(self, buffer: ModeBuffer, fault: Fault, changes: WeightChanges) -> None:
        self._buffer = buffer
        self._fault = fault
        self._changes = changes
        self._plans: IdentityDict[Optimizer, _UpdatePlan] = IdentityDict()
        self._updates: IdentityDict[Optimizer, _BegunUpdate] = IdentityDict()
        self._weights = WeightCopies()
        self.left_out: set[str] = set()

    def begin(self, optimizer: Optimizer, watches: Mapping[int, ParameterWatch]) -> None:
        """Record values before an update, and copy the weights whose update is wanted.

        Args:
            optimizer: the optimizer.
            watches: those of parameters, by identity.
        """
        if count_function_modes() and self._buffer.custom is None:  # each attribute would pass through them
            with without_functions():
                self._begin(optimizer, watches)
        else:
            self._begin(optimizer, watches)

    def _begin(self, optimizer: Optimizer, watches: Mapping[int, ParameterWatch]) -> None:
        self._buffer.touched = True
        held = held_by(optimizer)
        plan, of_held = self._plans.get(optimizer), list(map(watches.get, map(id, held)))
        if plan is None or plan.watches != of_held:
            plan = self._plans[optimizer] = _make_plan(of_held)
        for place, value in plan.values:
            self._see_value(value, held[place])
        recorders, rows, parameters = plan.recorders, plan.rows, [held[place] for place in plan.places]
        weights = parameters if set(map(type, parameters)) == {nn.Parameter} else list(map(_values_of, parameters))
        if sum(map(_size, weights)) > LIMITS.copied_bytes:
            fits = self._find_fitting(recorders, weights)
            recorders, rows = list(compress(recorders, fits)), list(compress(rows, fits))
            parameters, weights = list(compress(parameters, fits)), list(compress(weights, fits))
        plain: list[torch.Tensor | None] = list(weights)
        if plan.keeps:
            plain = [None if each.keep is not None else weight for each, weight in zip(recorders, weights, strict=True)]
        self._updates[optimizer] = _BegunUpdate(
            recorders, rows, parameters, self._weights.take(optimizer, plain, weights)
        )

    def _find_fitting(self, recorders: list[TensorRecorder], weights: list[torch.Tensor]) -> list[bool]:
        """Return which weights may be copied before the limit is reached, and record the others."""
        sizes = accumulate(map(_size, weights))
        fits = [size <= LIMITS.copied_bytes for size in sizes]
        self.left_out.update(recorder.name for recorder, fit in zip(recorders, fits, strict=True) if not fit)
        return fits

    def _see_value(self, value: TensorRecorder, parameter: torch.Tensor) -> None:
        try:
            value.see(read_unseen(parameter, own_values))
        except Exception as error:
            self._fault(value.site, error)

    def end(self, optimizer: Optimizer, count: int) -> None:
        """Measure the update that has been made, behind so many others of this optimizer."""
        update = self._updates.pop(optimizer, None)
        if update is None:
            return
        with without_functions():
            self._end(optimizer, update, count)

    def _end(self, optimizer: Optimizer, update: _BegunUpdate, count: int) -> None:
        recorders, rows, parameters, copies = update
        slab = self._buffer.slab(_CPU) if bytearray in map(type, copies) else None
        bits = bytearray(16 * len(rows))
        at = 0
        while (at := observe_updates(slab, parameters, copies, rows, at, bits)) < len(rows):
            try:
                recorders[at].see_update(_values_of(parameters[at]), copies[at])
            except Exception as error:
                self._fault(recorders[at].site, error)
            at += 1
        if slab is not None:
            self._changes.see(optimizer, recorders, parameters, bits, count)
        self._weights.give_back(optimizer, copies)

    def release(self) -> None:
        """Give up the memory of copies: nothing more is measured."""
        self._weights = WeightCopies()
        self._changes.release()
        self._updates.clear()
        self._plans.clear()

    def abandon(self, optimizer: Optimizer) -> None:
        """Forget the copies for an update that was not made."""
        update = self._updates.pop(optimizer, None)
        if update is not None:
            self._weights.give_back(optimizer, update.copies)


_CPU = torch.device("cpu")
_size = attrgetter("nbytes")


def _values_of(parameter: torch.Tensor) -> torch.Tensor:
    """What this process holds of a parameter: a plain one as it is, since to detach it takes longer than to read it."""
    return parameter if type(parameter) is nn.Parameter else own_values(parameter)


_SKIPPED = "loss scaling found a gradient that is not finite"


def _explain_skip(ending: str) -> str:
    return f"{_SKIPPED}; {ending}" if ending else _SKIPPED


class OptimizerWatch:
    """Listens to every optimizer of the process and heeds those of the recorded models.

    Args:
        clock: notified of updates that end a step.
        events: takes what happened, and faults.
        steps: says which updates end a step.
        taps: has the watches of parameters.
        buffer: where updates are recorded.
        loose: taps what belongs to no model; None where that is not wanted.
        names: those of the optimizers.
        scalars: notified of recorded updates.
        deliveries: bring numbers from devices.

    Attributes:
        updates: measures the updates.
        scales: what losses were multiplied by.
    """

    def __init__(
        self,
        clock: Clock,
        events: EventLog,
        steps: Steps,
        taps: Taps,
        buffer: ModeBuffer,
        loose: LooseParameters | None,
        names: OptimizerNames,
        scalars: ScalarWatch,
        deliveries: Deliveries,
    ) -> None:
        self._scalars = scalars
        self._deliveries = deliveries
        self._clock = clock
        self._events = events
        self._steps = steps
        self._taps = taps
        self._parameters = taps.parameters
        self._loose = loose
        self._names = names
        self.fault = events.fault
        changes = WeightChanges(events.note_fact, self._find_name, lambda: events.fact_moment)
        self.updates = UpdateRecorder(buffer, self.fault, changes)
        self.scales = LossScales()
        self._counts: IdentityDict[Optimizer, int] = IdentityDict()
        self._passes = 0
        """Passes that had ended when an optimizer had last updated."""
        self._undecided: list[tuple[Moment, str, int, str, torch.Tensor]] = []

    def pass_begins(self) -> None:
        """Search for loose parameters before a backward pass."""
        if self._loose is not None:
            self._loose.look()

    @never_raise()
    def update_begins(self, optimizer: Optimizer) -> None:
        """Begin to measure an update when ``optimizer.step`` is called."""
        if self._loose is not None:
            self._loose.see(optimizer)
        if is_tracing() or not self._is_heeded(optimizer):  # what a CUDA graph captures is no update yet
            return
        self._steps.update_begins(optimizer)
        if self._clock.on:
            if self._taps.unseen:
                self._taps.tell_of_missing()
            if self._clock.measures_updates:
                self.updates.begin(optimizer, self._parameters)
            if self._has_accumulated(optimizer):
                self._taps.see_accumulated(held_by(optimizer))
        if self._clock.is_noted:
            self._scalars.update_begins(optimizer)

    @never_raise()
    def update_ends(self, optimizer: Optimizer, found_inf: torch.Tensor | None) -> None:
        """Measure and note the update when the parameters have been changed."""
        if is_tracing() or not self._is_heeded(optimizer):
            return
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self._passes = self._scalars.norms.passes
        self.updates.end(optimizer, count)
        if self._clock.is_noted:
            self._scalars.update_ends(optimizer)
        name = self._find_name(optimizer)
        with self._ending(optimizer) as ending:
            if self._clock.is_noted:
                self._tell(name, count, ending, found_inf)

    def _has_accumulated(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients of this update come from several passes; not known where optimizers take turns.

        Nor while a loss is scaled that the optimizer itself divides by, and in pipelines, whose passes are one.
        """
        is_scaled = getattr(optimizer, "grad_scale", None) is not None
        if self._scalars.norms.passes - self._passes < 2 or is_scaled or self._clock.is_piped:
            return False
        if not self._counts:  # the first update: others may be to come
            self._counts.update((each, 0) for each in list_optimizers() if self._steps.trains(each))
        return all(other is optimizer for other in self._counts)

    def _find_name(self, optimizer: Optimizer) -> str:
        return self._names.find(optimizer, MOST_OPTIMIZERS)

    def _tell(self, name: str, count: int, ending: str, found_inf: torch.Tensor | None) -> None:
        if found_inf is None:
            self._events.note("update", name, value=count, text=ending)
        else:
            self._undecided.append((self._clock.moment, name, count, ending, found_inf))

    @never_raise()
    def update_skipped(self, optimizer: Optimizer) -> None:
        """Record an update that loss scaling has left out; the step counts all the same, so that it can be seen."""
        if self._is_heeded(optimizer):
            self._passes = self._scalars.norms.passes
            self.updates.abandon(optimizer)
            with self._ending(optimizer) as ending:
                self._events.note("skipped", self._find_name(optimizer), text=_explain_skip(ending))

    @never_raise()
    def loss_scaled(self, losses: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
        """Record that the gradients of these losses are ``scale`` times too large."""
        if threading.get_ident() == self._clock.thread:
            self.scales.add(losses, scale)

    def decide(self) -> None:
        """Find out whether optimizers that heed loss scaling by themselves did update."""
        undecided, self._undecided = self._undecided, []
        if undecided:
            self._deliveries.add_numbers([each[-1] for each in undecided], partial(self._note_decided, undecided))

    def _note_decided(
        self, undecided: Sequence[tuple[Moment, str, int, str, torch.Tensor]], found: list[float]
    ) -> None:
        for (moment, name, count, ending, _), has_inf in zip(undecided, found, strict=True):
            if has_inf:
                self._events.note("skipped", name, text=_explain_skip(ending), moment=moment)
            else:
                self._events.note("update", name, value=count, text=ending, moment=moment)

    def forget_losses(self) -> None:
        """Forget the losses when all passes over their graph are done."""
        self.decide()
        self.scales.forget()

    @contextlib.contextmanager
    def _ending(self, optimizer: Optimizer) -> Iterator[str]:
        """Ends the step behind what is reported of an update, where that ends it; else says that it does not."""
        ends_step = self._steps.ends_step(optimizer)
        yield "" if ends_step or self._clock.is_led else ENDS_NONE
        if ends_step:
            self._clock.end_step()

    def _is_heeded(self, optimizer: Optimizer) -> bool:
        """Return whether an update counts; a stranger's does if a pass has reached the models since the last."""
        was_reached = self._clock.was_reached and threading.get_ident() == self._clock.thread
        return self._steps.counts(optimizer, otherwise=was_reached)
