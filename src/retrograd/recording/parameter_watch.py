"""A parameter: its value, the gradient of each backward pass, and what the optimizer adds to it.

For the last, a copy of the weights stands while ``step`` runs, and no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdRef

from retrograd.hooks.distributed import Exchange, is_summand, local_part
from retrograd.hooks.engine import count_function_modes, uncompiled, without_functions
from retrograd.hooks.gradients import watch_gradient
from retrograd.recording.backward_pass import RecordedPass
from retrograd.recording.mode_buffer import ModeBuffer
from retrograd.recording.site_recorder import TensorRecorder
from retrograd.sites.site import Site


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
    """

    __slots__ = (
        "_backward", "_clock", "_handle", "_parameter", "exchange", "gradient",
        "has_come", "is_alone", "local", "site", "update", "value",
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
        self.exchange: Exchange | None = None
        self.has_come = self.is_alone = False
        wants_gradient = gradient is not None or local is not None
        self._handle = watch_gradient(parameter, self.see_gradient) if wants_gradient else None

    @property
    def parameter(self) -> torch.Tensor | None:
        """The parameter; None if it is no longer there."""
        found: torch.Tensor | None = self._parameter()
        return found

    @uncompiled
    def see_gradient(self, gradient: torch.Tensor) -> None:
        """The hook: record the gradient."""
        if self._clock.on and (self._clock.entered or self._backward.enter()):
            self.has_come = True
            tensor_recorder = self.gradient
            if self.exchange is not None or is_summand(gradient):
                tensor_recorder, self.is_alone = self.local, True
            if tensor_recorder is None:
                return
            try:
                tensor_recorder.see(gradient)
            except Exception as error:
                self._backward.fault(tensor_recorder.site, error)

    see_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Take the hook back."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


Fault = Callable[[Site, Exception], None]

COPY_LIMIT = 1024**3
"""Bytes of weights that are copied at most while an optimizer steps: 1 GiB. Parameters beyond it are left out."""


class UpdateRecorder:
    """Measures the updates of the optimizers that step now."""

    def __init__(self, buffer: ModeBuffer) -> None:
        self._buffer = buffer
        self._copies: WeakKeyDictionary[Optimizer, list[tuple[ParameterWatch, torch.Tensor]]] = WeakKeyDictionary()
        self.left_out: set[str] = set()

    def begin(self, optimizer: Optimizer, watches: Iterable[ParameterWatch], fault: Fault) -> None:
        """An update begins: record values and copy those weights whose update is wanted."""
        if count_function_modes() and self._buffer.custom is None:  # each attribute would pass through them
            with without_functions():
                self._begin(optimizer, watches, fault)
        else:
            self._begin(optimizer, watches, fault)

    def _begin(self, optimizer: Optimizer, watches: Iterable[ParameterWatch], fault: Fault) -> None:
        self._buffer.touched = True
        copies: list[tuple[ParameterWatch, torch.Tensor]] = []
        size = 0
        for watch in watches:
            parameter = watch.parameter
            if parameter is None:
                continue
            parameter = local_part(parameter.detach())
            if watch.value is not None:
                try:
                    watch.value.see(parameter)
                except Exception as error:
                    fault(watch.value.site, error)
            if watch.update is None:
                continue
            size += parameter.nbytes
            if size > COPY_LIMIT:
                self.left_out.add(str(watch.update.site))
            else:
                copies.append((watch, parameter.clone()))
        self._copies[optimizer] = copies

    def end(self, optimizer: Optimizer, fault: Fault) -> None:
        """The update has been made: measure it."""
        for watch, before in self._copies.pop(optimizer, ()):
            update: TensorRecorder = watch.update  # type: ignore[assignment]
            parameter = watch.parameter
            try:
                if parameter is not None:
                    update.see_update(local_part(parameter.detach()), before)
            except Exception as error:
                fault(update.site, error)

    def abandon(self, optimizer: Optimizer) -> None:
        """The update was not made."""
        self._copies.pop(optimizer, None)
