"""A place: one site at one call in one lane, and where its value and its gradient go.

Places live as long as the recorder, so that nothing is made anew in a training step: the hook on a tensor is the
place's own method, the same at every step. Their two ``see_`` methods are run for every tensor that is recorded;
what they do is written out in them, because a further Python call would be a tenth of their cost.
"""

from __future__ import annotations

from typing import Protocol

import torch

from retrograd.hooks.deep_graphs import DeepGraphGuard
from retrograd.hooks.engine import uncompiled
from retrograd.hooks.tables import Entry
from retrograd.hooks.tensor import GradientWatch
from retrograd.recording.clock import Clock
from retrograd.recording.stream import Stream
from retrograd.sites.site import Site


class Host(Protocol):
    """What a place needs of its recorder."""

    clock: Clock
    guard: DeepGraphGuard
    leaf_handles: list[Entry]

    def enter_backward(self) -> bool:
        """Told at the first gradient of a pass; returns whether it is recorded."""

    def fault(self, site: Site, error: Exception) -> None:
        """Told of an error at a tap; training goes on."""


class Place:
    """The value and the gradient of one site, seen at the same call.

    Args:
        host: the recorder.
        value: where the value goes; None when it is not recorded.
        gradient: where its gradient goes; None when it is not recorded.
    """

    __slots__ = ("_clock", "_enter", "_gradient", "_host", "_value", "_watch")

    def __init__(self, host: Host, value: Stream | None, gradient: Stream | None) -> None:
        self._clock = host.clock
        self._enter = host.enter_backward
        self._host = host
        self._value = value
        self._gradient = gradient
        self._watch = (
            GradientWatch(self.see_gradient, host.guard, host.leaf_handles, gradient.copy_from_now_on)
            if gradient is not None
            else None
        )

    @property
    def value(self) -> Stream | None:
        """Where the value goes."""
        return self._value

    @property
    def gradient(self) -> Stream | None:
        """Where the gradient goes."""
        return self._gradient

    @property
    def wants_gradient(self) -> bool:
        """Whether the gradient is recorded."""
        return self._gradient is not None

    def see_value(self, tensor: torch.Tensor) -> bool:
        """Record the value and set a hook for its gradient; returns whether that gradient will come."""
        requires_grad = None
        value = self._value
        if value is not None:
            if value.row >= 0:
                requires_grad = (value.observe or value.bind(tensor))(tensor, value.row)
            if value.keep is not None or value.custom is not None:
                value.see_more(tensor)
        watch = self._watch
        if watch is None or requires_grad is False or not (requires_grad or tensor.requires_grad):
            return False
        watch.watch(tensor)
        return True

    @uncompiled
    def see_gradient(self, gradient: torch.Tensor) -> None:
        """The hook: record the gradient."""
        if self._clock.entered or self._enter():
            stream: Stream = self._gradient  # type: ignore[assignment]
            try:
                if stream.row >= 0:
                    (stream.observe or stream.bind(gradient))(gradient, stream.row)
                if stream.keep is not None or stream.custom is not None:
                    stream.see_more(gradient)
            except Exception as error:
                if gradient is not None:  # as it is where another output of the same node was used, and this one not
                    self._host.fault(stream.site, error)

    see_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def record(self, tensor: torch.Tensor) -> None:
        """Record the value alone."""
        if self._value is not None:
            self._value.see(tensor)

    def watch(self, tensor: torch.Tensor) -> None:
        """Set a hook for the gradient alone: the value was recorded before."""
        if self._watch is not None and tensor.requires_grad:
            self._watch.watch(tensor)

    def remove(self) -> None:
        """Take the hook back."""
        if self._watch is not None:
            self._watch.remove()
