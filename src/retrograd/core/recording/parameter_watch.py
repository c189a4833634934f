"""A parameter: its value, and the gradient of each backward pass.

Where processes reduce gradients between them, these are read when a pass is over: as the optimizer will find them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdRef

from retrograd.core.hooks.engine import uncompiled
from retrograd.core.hooks.gradients import after_accumulation, watch_gradient
from retrograd.core.hooks.listeners import HookEntry, never_raise
from retrograd.core.hooks.parts import modules_of
from retrograd.core.hooks.resting import TapSwitch, add_tap, change_taps
from retrograd.core.identities import IdentitySet
from retrograd.core.limits import LIMITS
from retrograd.core.ranks.placements import is_summand, local_part
from retrograd.core.ranks.reductions import Averaging, Exchange, find_sharding, is_averaging
from retrograd.core.recording.clock import RecordedPass
from retrograd.core.recording.site_recorder import TensorRecorder
from retrograd.core.sites.site import Site


class ParameterWatch:
    """Records one parameter.

    Args:
        backward: the pass that runs, asked whether it is recorded.
        site: the parameter's site.
        parameter: the parameter, which is not held.
        gone: called when it is no longer there.
        value: where its value goes when an update begins.
        gradient: where the gradient of each pass goes, before it is added to ``.grad``; where processes reduce it,
            what that has added to ``.grad``.
        local: where what this process alone has found goes, if processes reduce it.
        update: where the difference that an update makes goes.

    Attributes:
        exchange: what reduces the gradient between processes; None where nothing does.
        has_come: this process has found a gradient in the pass.
        is_alone: what it has found was still to be reduced.
        accumulated: where what several passes have left in ``.grad`` goes; None until a step had some.
    """

    __slots__ = (
        "__weakref__",
        "_backward",
        "_clock",
        "_handles",
        "_parameter",
        "_whole",
        "accumulated",
        "exchange",
        "gradient",
        "has_come",
        "is_alone",
        "local",
        "site",
        "update",
        "value",
    )  # fmt: skip

    def __init__(
        self,
        backward: RecordedPass,
        site: Site,
        parameter: torch.Tensor,
        gone: Callable[[Any], None],
        *,
        value: TensorRecorder | None,
        gradient: TensorRecorder | None,
        local: TensorRecorder | None,
        update: TensorRecorder | None,
    ) -> None:
        self._backward = backward
        self._clock = backward.clock
        self.site = site
        self._parameter = WeakIdRef(parameter, gone)
        self.value = value
        self.gradient = gradient
        self.local = local
        self.update = update
        self.accumulated: TensorRecorder | None = None
        self.exchange: Exchange | None = None
        self.has_come = self.is_alone = False
        self._handles: list[HookEntry] = []
        if gradient is not None or local is not None:
            self._handles.append(watch_gradient(parameter, self.see_gradient))
            add_tap(self)
        self._whole: WeakIdRef | None = None

    @property
    def parameter(self) -> torch.Tensor | None:
        """The parameter; None if it is no longer there."""
        found: torch.Tensor | None = self._parameter()
        return found

    @property
    def switch(self) -> TapSwitch:
        """Holds whether there is anything to do."""
        return self._clock

    @property
    def watchers(self) -> tuple[ParameterWatch, ...]:
        """This watch, while it has hooks."""
        return (self,) if self._handles else ()

    @property
    def entries(self) -> tuple[HookEntry, ...]:
        """Its hooks."""
        return tuple(self._handles)

    @property
    def wants_whole(self) -> bool:
        """True if what this process finds alone is wanted, and no whole parameter is watched at which it comes."""
        return self.local is not None and (self._whole is None or self._whole() is None)

    def is_reduced_by(self, exchange: Exchange) -> None:
        """Have what reduces the gradient: all that comes is to be looked at from now on."""
        self.exchange = exchange

    def watch_whole(self, whole: torch.Tensor) -> None:
        """Record what comes at the whole parameter that this one is a part of: what this process finds alone."""
        self._whole = WeakIdRef(whole)
        change_taps()
        self._handles.append(watch_gradient(whole, self.see_gradient))

    @uncompiled
    def see_gradient(self, gradient: torch.Tensor | None) -> None:
        """The hook: record the gradient; compiled code gives None where there is none."""
        clock = self._clock
        if gradient is not None and clock.on and (clock.entered or clock.is_second_half or self._backward.enter()):
            self.has_come = True
            tensor_recorder = self.gradient
            if self.exchange is not None or (type(gradient) is not torch.Tensor and is_summand(gradient)):
                tensor_recorder, self.is_alone = self.local, True
            if tensor_recorder is None:
                return
            try:
                tensor_recorder.see(gradient)
            except Exception as error:
                self._backward.fault(tensor_recorder.site, error)

    see_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Take the hooks back."""
        change_taps()
        while self._handles:
            self._handles.pop().remove()


class ReducedGradient:
    """Reads what a reduction adds to the ``.grad`` of one parameter.

    Args:
        watch: the watch of the parameter.
        is_hooked: whether a hook tells it when a gradient comes; else a change of ``.grad`` does.

    Attributes:
        watch: that watch.
        is_followed: torch tells of it, too, when it is reduced outside of a pass.
        is_beyond: what was there already is more than may be copied, so that what is added cannot be told.
    """

    __slots__ = ("_before", "_is_hooked", "_is_waiting", "_mark", "is_beyond", "is_followed", "watch")

    def __init__(self, watch: ParameterWatch, *, is_hooked: bool) -> None:
        self.watch = watch
        self._is_hooked = is_hooked
        self._before: torch.Tensor | None = None
        self._is_waiting = self.is_beyond = self.is_followed = False
        self._mark: tuple[int, int] | None = None

    def remember(self, room: int) -> int:
        """Copy what ``.grad`` holds before a pass, in at most ``room`` bytes; returns how many."""
        gradient = _gradient_of(self.watch)
        self.watch.has_come = False
        self._mark = _mark(gradient)
        if self._is_waiting and gradient is not None:
            return 0
        self._before, self.is_beyond = None, gradient is not None and gradient.nbytes > room
        if gradient is None or self.is_beyond:
            return 0
        self._before = gradient.clone()
        return gradient.nbytes

    def has_come(self) -> bool:
        """Return whether the pass has added anything to ``.grad``."""
        may_have = self.watch.has_come or not self._is_hooked
        return may_have and _mark(_gradient_of(self.watch)) != self._mark

    def wait(self) -> None:
        """Wait: what was added is not reduced yet."""
        self._is_waiting = True

    def take(self) -> torch.Tensor | None:
        """Take what was added since it was last reduced, or cleared, if that can be told; nothing is held after."""
        self._is_waiting = False
        before, self._before = self._before, None
        gradient = None if self.is_beyond else _gradient_of(self.watch)
        return gradient if gradient is None or before is None else gradient - before


def _gradient_of(watch: ParameterWatch) -> torch.Tensor | None:
    parameter = watch.parameter
    gradient = None if parameter is None else parameter.grad
    if gradient is None:
        return None
    with torch.no_grad():  # else a DTensor gives a copy of its part, which counts its own versions
        part: torch.Tensor = local_part(gradient)
    return part.detach()


def _mark(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (gradient.data_ptr(), gradient._version)


class Reductions:
    """Reads what reductions add to ``.grad``: the mean of what the processes have found in one pass.

    After passes that were not reduced themselves (as in
    ``no_sync()``) it is the mean of all that has gathered. What a pass leaves unreduced is not read here at all.

    Args:
        backward: the pass that runs, asked whether it is recorded.

    Attributes:
        groups: the gradients of each exchange.
        left_out: printed sites of gradients that could not be told, at least once, for their size.
    """

    def __init__(self, backward: RecordedPass) -> None:
        self._backward = backward
        self.left_out: set[str] = set()
        self.groups: list[_ExchangedGradients] = []
        self._wrappers: IdentitySet[nn.Module] = IdentitySet()
        self._handles: list[Callable[[], None]] = []

    def add_model(self, model: nn.Module) -> None:
        """Find the exchanges of a model that is recorded from now on, or has been spread anew."""
        wrappers = [each for each in modules_of(model) if is_averaging(each) and each not in self._wrappers]
        self._wrappers.update(wrappers)
        sharding = find_sharding(model)
        self.groups += map(_ExchangedGradients, [*map(Averaging, wrappers), *([sharding] if sharding else ())])

    def adopt(self, watch: ParameterWatch) -> None:
        """Find out who reduces the gradient of a parameter, if anybody does."""
        parameter = watch.parameter
        if parameter is None or watch.exchange is not None:
            return
        for group in self.groups:
            if group.exchange.reduces(parameter):
                watch.is_reduced_by(group.exchange)
                group.gradients.append(ReducedGradient(watch, is_hooked=bool(group.exchange.ranks)))

    def meet_wrapper(self, wrapper: nn.Module) -> bool:
        """Add a wrapper that calls a recorded model; returns whether it reduces gradients and was not known."""
        if wrapper in self._wrappers or not is_averaging(wrapper):
            return False
        self._wrappers.add(wrapper)
        exchange = Averaging(wrapper)
        exchange.before_forward(wrapper, (), {})
        self.groups.append(_ExchangedGradients(exchange))
        return True

    def pass_begins(self) -> None:
        """Remember all gradients before a pass that may be recorded."""
        room = LIMITS.copied_bytes
        for group in self.groups:
            group.gradients = [each for each in group.gradients if each.watch.parameter is not None]
            group.watch_wholes()
            if self._backward.clock.is_piped and not group.exchange.ranks:
                self._follow(group)
            for gradient in group.gradients:
                room -= gradient.remember(room)
                if gradient.is_beyond:
                    self.left_out.add(str(gradient.watch.site.grad))

    def _follow(self, group: _ExchangedGradients) -> None:
        """Have torch tell of gradients that a stage of a pipeline reduces behind its last pass."""
        for gradient in group.gradients:
            parameter = gradient.watch.parameter
            if parameter is not None and not gradient.is_followed:
                gradient.is_followed = True
                self._handles.append(after_accumulation(parameter, partial(self._reduced, gradient)))

    @never_raise()
    def _reduced(self, gradient: ReducedGradient, parameter: torch.Tensor) -> None:
        if not self._backward.is_running and self._backward.clock.on:
            self._record(gradient, is_recorded=True)

    def pass_ends(self) -> None:
        """Record what the pass has reduced."""
        for group in self.groups:
            for gradient in group.finish():
                self._record(gradient, is_recorded=self._is_recorded())

    def remove(self) -> None:
        """Take every hook back."""
        for group in self.groups:
            group.exchange.remove()
        self.groups.clear()
        while self._handles:
            self._handles.pop()()

    def _record(self, gradient: ReducedGradient, *, is_recorded: bool) -> None:
        tensor_recorder = gradient.watch.gradient
        try:
            total = gradient.take()
            if tensor_recorder is not None and total is not None and is_recorded:
                tensor_recorder.see(total)
        except Exception as error:
            self._backward.fault(gradient.watch.site.grad, error)

    def _is_recorded(self) -> bool:
        clock = self._backward.clock
        return clock.entered or clock.is_second_half or self._backward.enter()


class _ExchangedGradients:
    """The gradients of one exchange, those that are being reduced apart."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.gradients: list[ReducedGradient] = []
        self._begun: dict[int, ReducedGradient] = {}

    def watch_wholes(self) -> None:
        """Watch whole parameters that forwards have gathered since, where what this process finds alone is wanted."""
        wanting = {id(each.watch.parameter): each.watch for each in self.gradients if each.watch.wants_whole}
        if wanting:
            for parameter, whole in self.exchange.find_wholes():
                watch = wanting.pop(id(parameter), None)
                if watch is not None:
                    watch.watch_whole(whole)

    def finish(self) -> Sequence[ReducedGradient]:
        """Take the gradients that have been reduced by now."""
        come = [each for each in self.gradients if each.has_come()]
        if come and self.exchange.has_begun():
            self._begun.update((id(each), each) for each in come)
        for each in come:
            each.wait()
        if not (come and self._begun and self.exchange.has_ended()):
            return ()
        self.exchange.close()
        ended, self._begun = list(self._begun.values()), {}
        return ended
