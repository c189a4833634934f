"""Records one site at one call: its value and its gradient, each into a row of a buffer, and kept if that was asked.

These objects live as long as the recorder of the run, so that nothing is made anew in a training step: the hook on a
tensor is an object's own method, the same at every step. The two ``see_`` methods are run for every tensor that is
recorded; what they do is written out in them, because a further Python call would be a tenth of their cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from retrograd.hooks.distributed import is_sharded, local_part
from retrograd.hooks.engine import is_transformed, uncompiled
from retrograd.hooks.reach import DeepGraphGuard
from retrograd.hooks.tables import Entry
from retrograd.hooks.tensor import GradientWatch
from retrograd.recording.clock import Clock
from retrograd.recording.keep import Keep
from retrograd.recording.mode_buffer import Mode, ModeBuffer
from retrograd.recording.site_table import Placements
from retrograd.recording.tensor_keeper import TensorKeeper
from retrograd.sites.site import Site
from retrograd.statistics.slab import UnreadableTensorError

NO_ROW = -1

Observe = Callable[[torch.Tensor, int], Any]


class TensorHost(Protocol):
    """What is needed of the recorder of a run."""

    keeper: TensorKeeper
    placements: Placements

    def fault(self, site: Site, error: Exception) -> None:
        """Told of an error at a tap; training goes on."""


class TensorRecorder:
    """Takes in the tensors of one site.

    Args:
        buffer: where rows and kept tensors go.
        site: the site.
        row: the site's row, or ``NO_ROW``.
        keep: the policy that keeps its tensors, or None.
        copy: its memory is used again (parameters and their gradients), so a kept tensor must be a copy.
        host: asked for room, and told when a user's statistic raises.
    """

    __slots__ = ("_buffer", "_copy", "_host", "custom", "keep", "name", "observe", "row", "site")

    def __init__(
        self, buffer: ModeBuffer, site: Site, row: int, keep: Keep | None, *, copy: bool, host: TensorHost
    ) -> None:
        self._buffer = buffer
        self._host = host
        self._copy = copy or buffer.mode is Mode.INFERENCE or (keep is not None and keep.copies)
        self.site = site
        self.name = str(site)
        self.row = row
        self.keep = keep
        self.custom = buffer.custom if row >= 0 else None
        self.observe: Observe | None = None

    def bind(self, tensor: torch.Tensor) -> Observe:
        """The slab's method for tensors like this one, remembered in ``observe``."""
        self.observe = self._buffer.slab(tensor.device).observe
        if is_sharded(tensor):
            self._host.placements.see_spread(self.site, tensor)
        return self.observe

    def copy_from_now_on(self) -> None:
        """Its memory may be used again after all."""
        self._copy = True

    def see(self, tensor: torch.Tensor) -> None:
        """Take in a tensor."""
        if self.row >= 0:
            (self.observe or self.bind(tensor))(tensor, self.row)
        if self.keep is not None or self.custom is not None:
            self.see_more(tensor)

    def see_more(self, tensor: torch.Tensor) -> None:
        """Take in a tensor for everything but the built-in statistics."""
        if type(tensor) is not torch.Tensor and is_sharded(tensor):
            tensor = local_part(tensor.detach())
        if self.custom is not None:
            try:
                self.custom.observe(tensor, self.row)
            except Exception as error:
                self._host.fault(self.site, error)  # the tensor itself is recorded all the same
        if self.keep is not None:
            self._keep(tensor, self.keep)

    def see_update(self, new: torch.Tensor, old: torch.Tensor) -> None:
        """Take in the difference of two tensors, and the size of the old one."""
        if self.row >= 0:
            self._buffer.slab(new.device).observe_update(new, old, self.row)
        if self.keep is not None:
            self._keep(new - old, self.keep)

    def _keep(self, tensor: torch.Tensor, keep: Keep) -> None:
        if is_transformed(tensor):
            raise UnreadableTensorError("it is seen inside a torch.func transform, where it has no values of its own")
        kept = keep.take(tensor) if self._copy else tensor.detach()
        try:
            version = kept._version
        except RuntimeError:  # an inference tensor counts no versions
            kept, version = keep.take(tensor), 0
        size = self._host.keeper.admit(keep, kept)
        if size is not None:
            self._buffer.kept.append((self, kept, version, size))


class SiteHost(Protocol):
    """What is needed of the recorder of a run."""

    clock: Clock
    guard: DeepGraphGuard
    leaf_handles: list[Entry]

    def enter_backward(self) -> bool:
        """Told at the first gradient of a pass; returns whether it is recorded."""

    def fault(self, site: Site, error: Exception) -> None:
        """Told of an error at a tap; training goes on."""


class SiteRecorder:
    """The value and the gradient of one site, seen at the same call.

    Args:
        host: the recorder.
        value: where the value goes; None when it is not recorded.
        gradient: where its gradient goes; None when it is not recorded.
    """

    __slots__ = ("_clock", "_enter", "_gradient", "_host", "_value", "_watch")

    def __init__(self, host: SiteHost, value: TensorRecorder | None, gradient: TensorRecorder | None) -> None:
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
    def value(self) -> TensorRecorder | None:
        """Where the value goes."""
        return self._value

    @property
    def gradient(self) -> TensorRecorder | None:
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
            tensor_recorder: TensorRecorder = self._gradient  # type: ignore[assignment]
            try:
                if tensor_recorder.row >= 0:
                    (tensor_recorder.observe or tensor_recorder.bind(gradient))(gradient, tensor_recorder.row)
                if tensor_recorder.keep is not None or tensor_recorder.custom is not None:
                    tensor_recorder.see_more(gradient)
            except Exception as error:
                if gradient is not None:  # as it is where another output of the same node was used, and this one not
                    self._host.fault(tensor_recorder.site, error)

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
