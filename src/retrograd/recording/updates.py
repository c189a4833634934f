"""What an optimizer adds to parameters: a copy of the weights stands while ``step`` runs, and no longer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer

from retrograd.hooks.distributed import local_part
from retrograd.hooks.engine import count_function_modes, without_functions
from retrograd.recording.mode_buffer import ModeBuffer
from retrograd.recording.parameter_watch import ParameterWatch
from retrograd.recording.site_recorder import TensorRecorder
from retrograd.sites.site import Site

Fault = Callable[[Site, Exception], None]

COPY_LIMIT = 1024**3
"""Bytes of weights that are copied at most while an optimizer steps: 1 GiB. Parameters beyond it are left out."""


class UpdateTap:
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
