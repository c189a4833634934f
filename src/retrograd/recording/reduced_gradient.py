"""The gradient of one parameter as processes have reduced it."""

from __future__ import annotations

import torch

from retrograd.hooks.distributed import local_part
from retrograd.recording.parameter_watch import ParameterWatch


class ReducedGradient:
    """What a reduction adds to the ``.grad`` of one parameter.

    Args:
        watch: the watch of the parameter.
        is_hooked: whether a hook tells it when a gradient comes; else a change of ``.grad`` does.

    Attributes:
        watch: that watch.
        is_beyond: what was there already is more than may be copied, so that what is added cannot be told.
    """

    __slots__ = ("_before", "_is_hooked", "_is_waiting", "_mark", "is_beyond", "watch")

    def __init__(self, watch: ParameterWatch, *, is_hooked: bool) -> None:
        self.watch = watch
        self._is_hooked = is_hooked
        self._before: torch.Tensor | None = None
        self._is_waiting = self.is_beyond = False
        self._mark: tuple[int, int] | None = None

    def remember(self, room: int) -> int:
        """A pass begins; returns the bytes that are copied, at most ``room``, of what ``.grad`` holds already."""
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
        """Whether the pass has added anything to ``.grad``."""
        may_have = self.watch.has_come or not self._is_hooked
        return may_have and _mark(_gradient_of(self.watch)) != self._mark

    def wait(self) -> None:
        """What was added is not reduced yet."""
        self._is_waiting = True

    def take(self) -> torch.Tensor | None:
        """What was added since it was last reduced, or cleared, if that can be told; nothing is held any longer."""
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
