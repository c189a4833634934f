"""A parameter: its value, the gradient of each backward pass, and what the optimizer adds to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdRef

from retrograd.hooks.distributed import Exchange, is_summand
from retrograd.hooks.engine import uncompiled
from retrograd.hooks.tensor import watch_gradient
from retrograd.recording.site_recorder import SiteHost, TensorRecorder
from retrograd.sites.site import Site


class ParameterWatch:
    """Records one parameter.

    Args:
        host: the recorder.
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
        "_clock", "_handle", "_host", "_parameter", "exchange", "gradient",
        "has_come", "is_alone", "local", "site", "update", "value",
    )  # fmt: skip

    def __init__(
        self,
        host: SiteHost,
        site: Site,
        parameter: torch.Tensor,
        gone: Callable[[Any], None],
        *,
        value: TensorRecorder | None,
        gradient: TensorRecorder | None,
        local: TensorRecorder | None,
        update: TensorRecorder | None,
    ) -> None:
        self._host = host
        self._clock = host.clock
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
        if self._clock.on and (self._clock.entered or self._host.enter_backward()):
            self.has_come = True
            tensor_recorder = self.gradient
            if self.exchange is not None or is_summand(gradient):
                tensor_recorder, self.is_alone = self.local, True
            if tensor_recorder is None:
                return
            try:
                tensor_recorder.see(gradient)
            except Exception as error:
                self._host.fault(tensor_recorder.site, error)

    see_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Take the hook back."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
