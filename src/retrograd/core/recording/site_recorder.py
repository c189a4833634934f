"""Records one site at one call: its value and its gradient, each into a row of a buffer, and kept if that was asked.

These objects live as long as the recorder of the run, so that nothing is made anew in a training step: the hook on a
tensor is the same at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from retrograd.core.hooks.dispatch import read_unseen
from retrograd.core.hooks.engine import is_transformed, uncompiled
from retrograd.core.hooks.gradients import GradientWatch
from retrograd.core.hooks.listeners import SeeGradient
from retrograd.core.ranks.placements import is_sharded, own_values
from retrograd.core.recording.clock import RecordedPass
from retrograd.core.recording.keep import Keep, KeptSource, TensorKeeper, find_keep
from retrograd.core.recording.mode_buffer import Mode, ModeBuffer, ModeBuffers
from retrograd.core.recording.settings import Settings
from retrograd.core.recording.sink_log import EventLog, RowTable, SitePlacements
from retrograd.core.sites.pattern import Candidate
from retrograd.core.sites.site import Site
from retrograd.core.statistics.slab import UnreadableTensorError

NO_ROW = -1

Observe = Callable[[torch.Tensor, int], Any]


class TensorRecorder(KeptSource):
    """Takes in the tensors of one site.

    Args:
        factory: what makes it: asked for room, and told when a user's statistic raises.
        buffer: where rows and kept tensors go.
        site: the site.
        row: the site's row, or ``NO_ROW``.
        keep: the policy that keeps its tensors, or None.
        copy: its memory is used again (parameters and their gradients), so a kept tensor must be a copy.

    Attributes:
        observe: the slab's method for its tensors, from the first one on.
    """

    __slots__ = ("_buffer", "_copy", "_factory", "custom", "observe")

    def __init__(
        self, factory: RecorderFactory, buffer: ModeBuffer, site: Site, row: int, keep: Keep | None, *, copy: bool
    ) -> None:
        super().__init__(site, row, keep)
        self._buffer = buffer
        self._factory = factory
        self._copy = copy or buffer.mode is Mode.INFERENCE or (keep is not None and keep.copies)
        self.custom = buffer.custom if row >= 0 else None
        self.observe: Observe | None = None

    def bind(self, tensor: torch.Tensor) -> Observe:
        """The slab's method for tensors like this one, remembered in ``observe``."""
        self.observe = self._buffer.slab(tensor.device).observe
        if is_sharded(tensor):
            self._factory.placements.see_spread(self.site, tensor)
        return self.observe

    def copy_from_now_on(self) -> None:
        """Copy what is kept from now on: its memory may be used again after all."""
        self._copy = True

    def see(self, tensor: torch.Tensor) -> Any:
        """Take in a tensor; returns whether it requires grad where the slab has asked that, else None."""
        requires_grad = (self.observe or self.bind(tensor))(tensor, self.row) if self.row >= 0 else None
        if self.keep is not None or self.custom is not None:
            self.see_more(tensor)
        return requires_grad

    def see_more(self, tensor: torch.Tensor) -> None:
        """Take in a tensor for everything but the built-in statistics."""
        if type(tensor) is not torch.Tensor and is_sharded(tensor):
            tensor = own_values(tensor)
        if self.custom is not None:
            try:
                self.custom.observe(tensor, self.row)
            except Exception as error:
                self._factory.events.fault(self.site, error)  # the tensor itself is recorded all the same
        if self.keep is not None:
            self._keep(tensor, self.keep)

    def see_update(self, new: torch.Tensor, old: torch.Tensor | bytearray) -> None:
        """Take in the difference of two tensors, and the size of the old one; a bytearray where nothing is kept."""
        if self.row >= 0:
            self._buffer.slab(new.device).observe_update(new, old, self.row)
        if self.keep is not None and not isinstance(old, bytearray):
            self._keep(read_unseen(new, lambda values: values.detach() - old), self.keep)

    def _keep(self, tensor: torch.Tensor, keep: Keep) -> None:
        if is_transformed(tensor):
            raise UnreadableTensorError("it is inside a torch.func transform, where it has no values of its own")
        kept = read_unseen(tensor, keep.take if self._copy else methodcaller("detach"))
        try:
            version = kept._version
        except RuntimeError:  # an inference tensor counts no versions
            kept, version = read_unseen(tensor, keep.take), 0
        size = self._factory.keeper.admit(keep, kept)
        if size is not None:
            self._buffer.kept.append((self, kept, version, size))


class SiteRecorder:
    """The value and the gradient of one site, seen at the same call.

    Args:
        backward: the pass that runs, asked whether it is recorded.

    Attributes:
        value: where the value goes; None when it is not recorded.
        gradient: where its gradient goes; None when it is not recorded.
    """

    __slots__ = ("_clock", "_enter", "_fault", "_is_copied", "_tell", "_watch", "gradient", "value")

    def __init__(self, backward: RecordedPass, value: TensorRecorder | None, gradient: TensorRecorder | None) -> None:
        self._clock = backward.clock
        self._enter = backward.enter
        self._fault = backward.fault
        self.value = value
        self.gradient = gradient
        self._watch: GradientWatch | None = None
        self._tell: SeeGradient | None = None
        self._is_copied = False
        if gradient is not None:
            self._tell = hook = self.see_gradient
            self._watch = GradientWatch(hook, backward.guard, backward.leaf_handles, gradient.copy_from_now_on)

    @property
    def wants_gradient(self) -> bool:
        """True if the gradient is recorded."""
        return self.gradient is not None

    def see_value(self, tensor: torch.Tensor) -> bool:
        """Record the value and set a hook for its gradient; returns whether that gradient will come."""
        value, requires_grad = self.value, None
        if value is not None:  # as ``value.see(tensor)``, which is a call more for each module and step
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
            tensor_recorder: TensorRecorder = self.gradient  # type: ignore[assignment]
            try:
                if tensor_recorder.row >= 0:
                    (tensor_recorder.observe or tensor_recorder.bind(gradient))(gradient, tensor_recorder.row)
                if tensor_recorder.keep is not None or tensor_recorder.custom is not None:
                    tensor_recorder.see_more(gradient)
            except Exception as error:
                if gradient is not None:  # as it is where another output of the same node was used, and this one not
                    self._fault(tensor_recorder.site, error)

    see_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def record(self, tensor: torch.Tensor) -> None:
        """Record the value alone."""
        if self.value is not None:
            self.value.see(tensor)

    def record_in_compiled_code(self, tensor: torch.Tensor) -> SeeGradient | None:
        """Record the value, whose memory is used again as that of its gradient is; returns what sees the gradient."""
        if not self._is_copied:
            self._is_copied = True
            for each in (self.value, self.gradient):
                if each is not None:
                    each.copy_from_now_on()
        try:
            if self.value is not None:
                self.value.see(tensor)
        except Exception as error:
            self._fault(self.value.site, error)  # type: ignore[union-attr]
        return self._tell

    def watch(self, tensor: torch.Tensor) -> None:
        """Set a hook for the gradient alone: the value was recorded before."""
        if self._watch is not None and tensor.requires_grad:
            self._watch.watch(tensor)

    def remove(self) -> None:
        """Take the hook back."""
        if self._watch is not None:
            self._watch.remove()


@dataclass(eq=False)
class RecorderFactory:
    """Makes the recorders of sites of which something is wanted.

    Attributes:
        settings: what is wanted.
        buffers: where it is recorded.
        rows: the numbering of rows.
        keeper: makes room for kept tensors.
        placements: notified of tensors that are spread over processes.
        events: takes faults.
        backward: the pass that runs.
        sees_gradients: whether any gradient is recorded.
    """

    settings: Settings
    buffers: ModeBuffers
    rows: RowTable
    keeper: TensorKeeper
    placements: SitePlacements
    events: EventLog
    backward: RecordedPass
    sees_gradients: bool = False
    _made: list[SiteRecorder] = field(default_factory=list)

    def make_site_recorder(
        self, buffer: ModeBuffer, module: nn.Module | None, site: Site, node: str | None = None
    ) -> SiteRecorder | None:
        """The recorder of a site, or None when neither its value nor its gradient is wanted."""
        value = self.make_tensor_recorder(buffer, module, site, node=node)
        gradient = None
        if buffer.mode is Mode.GRAD:
            gradient = self.make_tensor_recorder(buffer, module, site.grad, node=node)
        if value is None and gradient is None:
            return None
        recorder = SiteRecorder(self.backward, value, gradient)
        self._made.append(recorder)
        self.sees_gradients |= recorder.wants_gradient
        return recorder

    def make_named_recorder(self, mode: Mode, module: nn.Module | None, site: Site, key: str) -> SiteRecorder | None:
        """The recorder of a site that is recorded only where a pattern names its last key."""
        return self.make_site_recorder(self.buffers[mode], module, site) if self.settings.names(key) else None

    def make_tensor_recorder(
        self,
        buffer: ModeBuffer,
        module: nn.Module | None,
        site: Site,
        *,
        copy: bool = False,
        node: str | None = None,
    ) -> TensorRecorder | None:
        """The recorder of the tensors of a site, or None when nothing of them is wanted."""
        candidate = Candidate(site, module, node)
        has_row = self.settings.wants_statistics(candidate)
        keep = find_keep(self.settings.keeps, candidate)
        if not has_row and keep is None:
            return None
        return TensorRecorder(self, buffer, site, self.rows.number(site) if has_row else NO_ROW, keep, copy=copy)

    def remove(self) -> None:
        """Take the hooks of all that was made back."""
        for recorder in self._made:
            recorder.remove()
