"""The calls of models and of their modules: whose forward begins, what it returns and is called with."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from retrograd.core.hooks.calls import count_calls
from retrograd.core.hooks.checkpoints import CallsOfParts, is_computed_again, part_computed_again
from retrograd.core.hooks.engine import (
    OUTSIDE,
    count_function_modes,
    current_graph_task,
    current_node,
    grad_enabled,
    inference_enabled,
    is_in_backward,
    is_tracing,
    next_sequence_number,
    without_functions,
)
from retrograd.core.hooks.gradients import InputGradient, edge_of, hook_input_gradients
from retrograd.core.hooks.listeners import SeeGradient, never_raise
from retrograd.core.hooks.module import CallTap
from retrograd.core.hooks.names import ArgumentNames
from retrograd.core.hooks.nested import Keys, flatten
from retrograd.core.hooks.nodes import is_leaf, number_of
from retrograd.core.hooks.saved import top_pair
from retrograd.core.identities import IdentitySet
from retrograd.core.limits import LIMITS
from retrograd.core.progress.steps import Steps
from retrograd.core.ranks.reductions import running_wrapper
from retrograd.core.ranks.stages import is_rehearsal, may_have_stages, running_stage
from retrograd.core.recording.clock import RecordedPass
from retrograd.core.recording.facts import Facts
from retrograd.core.recording.mode_buffer import CallCount, Mode, ModeBuffer
from retrograd.core.recording.scalar_watch import ScalarWatch
from retrograd.core.recording.sink_log import SitePlacements
from retrograd.core.recording.site_recorder import RecorderFactory, SiteRecorder, TensorRecorder
from retrograd.core.sites.site import Site
from retrograd.core.spent import counted


def mode_now() -> Mode:
    """Grad mode of the code that runs now, or that it will have when a reentrant checkpoint computes it again."""
    if grad_enabled():
        return Mode.GRAD
    if inference_enabled():
        return Mode.INFERENCE
    return Mode.GRAD if is_computed_again() else Mode.NO_GRAD


def _mode_of(trains: bool) -> Mode:
    """Grad mode of compiled code, which runs without grad under an autograd Function that stands for it."""
    return Mode.GRAD if trains else mode_now()


SiteRecorders = dict[Keys, SiteRecorder | None]
"""The recorders of one call, by their keys."""


class SlotCalls(CallCount):
    """The recorders of one slot in one buffer, by call.

    Attributes:
        plain: that of each call that returned a tensor by itself, which is nearly every call: found by its number.
        recorders: all of each call, by their keys.
        unhooked: calls whose gradient has no hook yet, each with the number that the next node would have had then.
    """

    __slots__ = ("plain", "recorders", "unhooked")

    def __init__(self) -> None:
        super().__init__()
        self.plain: list[SiteRecorder | None] = []
        self.recorders: list[SiteRecorders] = []
        self.unhooked: list[tuple[int, SiteRecorders]] = []

    def gradients(self) -> list[TensorRecorder]:
        """Where the gradients of all calls go."""
        recorders = (
            recorder for recorders in self.recorders for recorder in recorders.values() if recorder is not None
        )
        return [recorder.gradient for recorder in recorders if recorder.gradient is not None]


class SlotWatch:
    """Records one slot of a module (or a tensor watched by hand) at each of its calls.

    Args:
        factory: makes the recorders.
        module: the module, which is not held; None for a tensor watched by hand.
        path: its path.
        keys: the slot.

    Attributes:
        path: the same.
    """

    __slots__ = ("_buffers", "_factory", "_is_crowded", "_keys", "_module", "_parts", "path", "switch")

    def __init__(self, factory: RecorderFactory, module: nn.Module | None, path: str, keys: Keys) -> None:
        self._factory = factory
        self._is_crowded = False
        self.switch = factory.backward.clock
        self._module = weakref.ref(module) if module is not None else None
        self.path = path
        self._keys = keys
        self._buffers = (SlotCalls(), SlotCalls(), SlotCalls())
        self._parts = CallsOfParts[list[SeeGradient | None]]()

    def see(self, value: Any) -> None:
        """Record the tensors in ``value`` as those of the next call."""
        self.after_forward(None, (), value)

    def after_forward(self, module: nn.Module | None, args: tuple[Any, ...], output: Any) -> None:
        """The forward hook: record the tensors in what was returned as those of the next call. It raises nothing."""
        try:
            clock = self.switch
            if current_graph_task() != OUTSIDE:  # a checkpointed part is computed again
                if clock.on:
                    self._see_again(flatten(output, self._keys))
                return
            buffer = clock.buffer
            if buffer is None and not is_tracing():
                buffer = clock.find_buffer(mode_now())
            if buffer is None or not clock.on:
                return
            calls, call = self._count_call(buffer)
            recorder = calls.plain[call]
            if recorder is None or type(output) is not torch.Tensor:
                hooked = self._see_nested(buffer, calls, call, flatten(output, self._keys))
            elif count_function_modes():
                hooked = self._visit_past_modes(recorder, output)
            else:
                hooked = recorder.see_value(output)
            if not hooked:
                self._await_hooks(buffer, calls, call)
        except Exception as error:
            self._fault(error)

    def _fault(self, error: Exception) -> None:
        self._factory.events.fault(Site(self.path, self._keys), error)

    def _await_hooks(self, buffer: ModeBuffer, calls: SlotCalls, call: int) -> None:
        if buffer.mode is Mode.GRAD and not grad_enabled():
            calls.unhooked.append((next_sequence_number(), calls.recorders[call]))

    def _visit(self, recorder: SiteRecorder, tensor: torch.Tensor) -> bool:
        """Record a tensor; returns whether its gradient is taken care of."""
        return recorder.see_value(tensor)

    def _visit_past_modes(self, recorder: SiteRecorder, tensor: torch.Tensor) -> bool:
        """Visit a tensor past function modes, which see each read attribute; not where users have statistics."""
        if recorder.value is not None and recorder.value.custom is not None:
            return self._visit(recorder, tensor)
        with without_functions():
            return self._visit(recorder, tensor)

    def _count_call(self, buffer: ModeBuffer) -> tuple[SlotCalls, int]:
        """Count a call in a buffer; returns its calls there, and the number of this one."""
        calls = self._buffers[buffer.mode]
        if calls.serial != buffer.serial:
            calls.serial = buffer.serial
            calls.count = 0
            calls.unhooked.clear()
            buffer.touched = True
        call = calls.count
        calls.count = call + 1
        return calls, call if call < len(calls.plain) else self._next_call(calls)

    def _next_call(self, calls: SlotCalls) -> int:
        """The number of a call that comes for the first time."""
        if len(calls.plain) < LIMITS.calls:
            calls.plain.append(None)
            calls.recorders.append({})
        elif calls.count == LIMITS.calls + 1:
            self._tell_crowded()
        return len(calls.plain) - 1

    def _tell_crowded(self) -> None:
        if not self._is_crowded:
            self._is_crowded = True
            site = Site(self.path, self._keys, LIMITS.calls)
            text = "this and all further calls within a micro-batch are merged"
            self._factory.events.note("note", str(site), text=text)

    def _see_nested(
        self, buffer: ModeBuffer, calls: SlotCalls, call: int, tensors: Iterable[tuple[Keys, torch.Tensor]]
    ) -> bool:
        hooked = True
        for keys, tensor in tensors:
            recorder = self._find_recorder(buffer, calls, call, keys, tensor)
            if recorder is None:
                continue
            try:
                hooked &= self._visit(recorder, tensor)
            except Exception as error:
                self._factory.events.fault(Site(self.path, keys, call + 1), error)
        return hooked

    def _find_recorder(
        self, buffer: ModeBuffer, calls: SlotCalls, call: int, keys: Keys, tensor: torch.Tensor
    ) -> SiteRecorder | None:
        recorders = calls.recorders[call]
        if keys not in recorders:
            site = Site(self.path, keys, call + 1)
            recorders[keys] = self._make_site_recorder(buffer, site)
            self._factory.placements.see(site, tensor)
            calls.plain[call] = recorders.get(self._keys)
        return recorders[keys]

    def find_site_recorder(self, buffer: ModeBuffer, call: int, keys: Keys) -> SiteRecorder | None:
        """The recorder of an earlier call with grad, made now if that call did not have these keys."""
        recorders = self.trained_calls.recorders[call]
        if keys not in recorders:
            recorders[keys] = self._make_site_recorder(buffer, Site(self.path, keys, call + 1))
            self.trained_calls.plain[call] = recorders.get(self._keys)
        return recorders[keys]

    def _make_site_recorder(self, buffer: ModeBuffer, site: Site) -> SiteRecorder | None:
        return self._factory.make_site_recorder(buffer, self._module() if self._module is not None else None, site)

    def _watch(self, recorder: SiteRecorder, tensor: torch.Tensor) -> None:
        """Take care of the gradient alone."""
        recorder.watch(tensor)

    def _see_again(self, tensors: Iterable[tuple[Keys, torch.Tensor]]) -> None:
        """Hook gradients in a reentrant checkpoint, whose first run had no grad: only its second has gradients.

        All calls of a checkpointed part have seen the number after that of the part's own node, or, in parts within
        it, a larger one. Parts are computed again from the last to the first, so no call of a later part is left.
        """
        unhooked = self._buffers[Mode.GRAD].unhooked
        node = current_node()
        if not unhooked or node is None:
            return
        part = number_of(node)
        index = next((index for index, (number, _) in enumerate(unhooked) if number > part), None)
        if index is None:
            return
        _, recorders = unhooked.pop(index)
        if not grad_enabled():  # a part within the part, which is computed once more in its own time
            unhooked.append((next_sequence_number(), recorders))
            return
        for keys, tensor in tensors:
            recorder = recorders.get(keys)
            if recorder is not None and tensor.requires_grad:
                self._watch(recorder, tensor)

    def see_in_compiled_code(
        self, tensors: Sequence[tuple[Keys, torch.Tensor]], trains: bool
    ) -> Sequence[SeeGradient | None]:
        """Record the tensors of a call that compiled code makes; returns what sees the gradient of each.

        It raises nothing. Gradients come without a hook on a tensor, and what is kept is copied, for its memory is used
        again.
        """
        try:
            return self._record_compiled(tensors, trains)
        except Exception as error:
            self._fault(error)
            return ()

    def _record_compiled(self, tensors: Sequence[tuple[Keys, torch.Tensor]], trains: bool) -> list[SeeGradient | None]:
        if is_in_backward():
            return self._parts.find_next(part_computed_again()) or []
        clock = self.switch
        buffer = clock.buffer or clock.find_buffer(_mode_of(trains))
        if not clock.on:
            return []
        calls, call = self._count_call(buffer)
        plain = calls.plain[call]
        if plain is not None and len(tensors) == 1 and not tensors[0][0]:
            told = [plain.record_in_compiled_code(tensors[0][1])]
        else:
            told = []
            for keys, tensor in tensors:
                recorder = self._find_recorder(buffer, calls, call, (*self._keys, *keys), tensor)
                told.append(None if recorder is None else recorder.record_in_compiled_code(tensor))
        if not trains or not grad_enabled() or top_pair() is not None:  # else nothing around it is computed again
            self._parts.add(told)
        return told

    @property
    def was_called(self) -> bool:
        """True if anything was ever seen here."""
        return any(calls.serial for calls in self._buffers)

    @property
    def trained_calls(self) -> SlotCalls:
        """Its calls with grad."""
        return self._buffers[Mode.GRAD]


class OutputWatch(SlotWatch):
    """Records a module's outputs."""

    __slots__ = ()

    def __init__(self, factory: RecorderFactory, module: nn.Module, path: str) -> None:
        super().__init__(factory, module, path, ("output",))

    def after_compiled_call(self, rest: Sequence[tuple[Keys, torch.Tensor]]) -> None:
        """Record what compiled code has not shown of the call that it makes: it has been counted."""
        try:
            self._record_rest([((*self._keys, *keys), tensor) for keys, tensor in rest])
        except Exception as error:
            self._fault(error)

    def _record_rest(self, tensors: Sequence[tuple[Keys, torch.Tensor]]) -> None:
        clock = self.switch
        if is_in_backward():
            if clock.on:
                self._see_again(tensors)
            return
        buffer = clock.buffer or clock.find_buffer(mode_now())
        calls = self._buffers[buffer.mode]
        if clock.on and calls.serial == buffer.serial and calls.plain:
            call = min(calls.count, len(calls.plain)) - 1
            if not self._see_nested(buffer, calls, call, tensors):
                self._await_hooks(buffer, calls, call)


class ArgumentWatch(SlotWatch):
    """Records the arguments of a module's calls."""

    __slots__ = ("_names", "_open", "_pending")

    def __init__(self, factory: RecorderFactory, module: nn.Module, path: str) -> None:
        super().__init__(factory, module, path, ("input",))
        self._names = ArgumentNames(module)
        self._pending: list[InputGradient] = []
        self._open: list[tuple[int, list[InputGradient]]] = []

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook: values are read before the module can overwrite them."""
        self._pending = []
        if self.switch.awake:
            try:
                self.see(self._names.bind(args, kwargs))
            except Exception as error:
                self._fault(error)
        self._open.append((next_sequence_number(), self._pending))

    def after_call(self, module: nn.Module, output: Any) -> None:
        """The forward hook, called also when the module raised, or when a hook before ours did."""
        if not self._open:
            return
        first_number, gradients = self._open.pop()
        try:
            if gradients and output is not None:
                outputs = [tensor for _, tensor in flatten(output, ()) if tensor.requires_grad]
                backward = self._factory.backward
                hook_input_gradients(gradients, outputs, first_number, backward.guard, backward.leaf_handles)
                backward.input_gradients.extend(gradients)
        except Exception as error:
            self._factory.events.fault(Site(self.path, self._keys, quantity="grad"), error)
        finally:
            gradients.clear()  # each holds the graph until its hooks are set

    def _visit(self, recorder: SiteRecorder, tensor: torch.Tensor) -> bool:
        recorder.record(tensor)
        if not (recorder.wants_gradient and tensor.requires_grad and grad_enabled()):
            return not recorder.wants_gradient
        self._watch(recorder, tensor)
        return True

    def _watch(self, recorder: SiteRecorder, tensor: torch.Tensor) -> None:
        found = edge_of(tensor)
        if found is not None:
            edge, number = found
            if is_leaf(edge.node) and recorder.gradient is not None:
                recorder.gradient.copy_from_now_on()
            self._pending.append(InputGradient(recorder.see_gradient, edge, number))


class ModelWatch:
    """Notifies the clock and the sources of facts of calls of a model.

    Args:
        backward: the pass that runs, and the clock.
        steps: notified of models that run.
        placements: told which stage of a pipeline a model is.
        facts: notified of forwards.
        scalars: the same.
        meet_wrapper: called with a wrapper that calls a model.
        renew: called when a model is about to run.
    """

    def __init__(
        self,
        backward: RecordedPass,
        steps: Steps,
        placements: SitePlacements,
        facts: Facts,
        scalars: ScalarWatch,
        meet_wrapper: Callable[[nn.Module], None],
        renew: Callable[[], None],
    ) -> None:
        self._clock = backward.clock
        self._backward = backward
        self.fault = backward.fault
        self._steps = steps
        self._meet_wrapper = meet_wrapper
        self._renew = renew
        self._taps: list[CallTap] = []
        self._placements = placements
        self._facts = facts
        self._scalars = scalars
        self._roots: IdentitySet[nn.Module] = IdentitySet()

    def add(self, module: nn.Module) -> None:
        """Take each call of this module, a model or a part of one, for a forward of its own."""
        if module not in self._roots:
            self._roots.add(module)
            self._taps.append(CallTap(module, self, outermost=True))

    @never_raise()
    @counted
    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the call of a model."""
        clock = self._clock
        if is_in_backward() or clock.is_paused:  # a checkpointed part is computed again
            return
        if is_tracing():
            clock.pause(id(module))
        else:
            self._begin_call(module, args, kwargs)

    def _begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        clock = self._clock
        self._backward.guard.begin_forward((args, kwargs))
        if clock.entered and not self._backward.is_running:
            clock.leave_backward(failed=True)  # a pass that we did not see begin has raised
        outermost = clock.outermost
        if outermost is not None and not self._is_running(outermost, module):
            clock.forward_left()
            outermost = None
        if outermost is None and may_have_stages():
            if is_rehearsal():
                clock.pause(id(module))
                return
            self._find_stage(module)
        wrapper = running_wrapper()
        if wrapper is not None:
            self._meet_wrapper(wrapper)
        if outermost is None:
            self._renew()
            self._placements.see_data((args, kwargs))
        clock.forward_begins(id(module), mode_now(), module.training)
        self._steps.model_runs(module)
        if outermost is None:
            self._facts.forward_begins(module, (args, kwargs))
            self._scalars.forward_begins(module, (args, kwargs))
            clock.rest()
        buffer = clock.waiting_buffer
        if buffer is not None:
            buffer.forwards.begin(id(module), module.training, buffer.serial)

    @never_raise()
    @counted
    def after_call(self, module: nn.Module, output: Any) -> None:
        """End the call; the output is None, too, where it has raised."""
        clock = self._clock
        failed = output is None and sys.exc_info()[0] is not None
        if clock.is_paused:
            clock.go_on(id(module))
        elif not is_in_backward():
            buffer = clock.waiting_buffer
            if buffer is not None:
                buffer.forwards.end(output, self._backward.guard, self._backward.leaf_handles)
            if clock.is_outermost:
                self._facts.forward_ends(module, output, failed)
                self._scalars.forward_ends(module, output)
            self._backward.guard.pause()
            clock.forward_ends(id(module), failed)

    def _find_stage(self, model: nn.Module) -> None:
        stage = running_stage()
        self._clock.is_piped = stage is not None
        if stage is not None:
            self._placements.set_stage(self._facts.models.name_of(model) or "", stage)

    def remove(self) -> None:
        """Take every hook back."""
        for tap in self._taps:
            tap.remove()

    def _is_running(self, outermost: int, model: nn.Module) -> bool:
        root = next((each for each in self._roots if id(each) == outermost), None)
        return root is not None and count_calls(root) > (root is model)
