"""A parameter: its value, the gradient of each backward pass, and what the optimizer adds to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdRef

from retrograd.hooks.engine import uncompiled
from retrograd.hooks.tensor import watch_gradient
from retrograd.recording.place import Host
from retrograd.recording.stream import Stream


class ParameterWatch:
    """Records one parameter.

    Args:
        host: the recorder.
        parameter: the parameter, which is not held.
        gone: called when it is no longer there.
        value: where its value goes when an update begins.
        gradient: where the gradient of each pass goes, before it is added to ``.grad``.
        update: where the difference that an update makes goes.
    """

    __slots__ = ("_clock", "_handle", "_host", "_parameter", "gradient", "update", "value")

    def __init__(
        self,
        host: Host,
        parameter: torch.Tensor,
        gone: Callable[[Any], None],
        *,
        value: Stream | None,
        gradient: Stream | None,
        update: Stream | None,
    ) -> None:
        self._host = host
        self._clock = host.clock
        self._parameter = WeakIdRef(parameter, gone)
        self.value = value
        self.gradient = gradient
        self.update = update
        self._handle = watch_gradient(parameter, self.see_gradient) if gradient is not None else None

    @property
    def parameter(self) -> torch.Tensor | None:
        """The parameter; None if it is no longer there."""
        found: torch.Tensor | None = self._parameter()
        return found

    @uncompiled
    def see_gradient(self, gradient: torch.Tensor) -> None:
        """The hook: record the gradient."""
        if self._clock.on and (self._clock.entered or self._host.enter_backward()):
            stream: Stream = self.gradient  # type: ignore[assignment]
            try:
                stream.see(gradient)
            except Exception as error:
                self._host.fault(stream.site, error)

    see_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Take the hook back."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
