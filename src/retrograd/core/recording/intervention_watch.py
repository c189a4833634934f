"""Changes that rules make in a recorded model: an event each, and where it is asked for the tensor from before."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from retrograd.core.hooks.engine import is_in_backward
from retrograd.core.hooks.listeners import never_raise
from retrograd.core.hooks.names import ModelNames
from retrograd.core.norms import norm
from retrograd.core.recording.emitter import Emitter
from retrograd.core.recording.mode_buffer import Mode
from retrograd.core.recording.module_watch import mode_now
from retrograd.core.recording.site_recorder import RecorderFactory, SiteRecorder
from retrograd.core.sites.site import BEFORE, Site


class InterventionWatch:
    """Records what rules change.

    Args:
        factory: makes recorders for what is to be recorded from before.
        emitter: takes the events.
        models: the recorded ones.
    """

    def __init__(self, factory: RecorderFactory, emitter: Emitter, models: ModelNames) -> None:
        self._factory = factory
        self._backward = factory.backward
        self._emitter = emitter
        self._models = models
        self._recorders: dict[tuple[Site, Mode], SiteRecorder | None] = {}
        self.fault = factory.events.fault

    @never_raise()
    def intervened(self, module: nn.Module | None, site: Site, rule: str, before: Tensor, after: Tensor) -> None:
        """Record that a rule has put ``after`` in the place of ``before``."""
        clock = self._backward.clock
        path = site.path if module is None else self._models.path_of(module)
        if not clock.on or path is None:
            return
        if "/" in site.path and module is not None and site.path != path:
            path = f"{path}/{site.path.rpartition('/')[2]}"  # of a function that it calls
        if is_in_backward() and not (clock.entered or self._backward.enter()):
            return
        site = replace(site, path=path)
        self._emitter.add_change(clock.moment, site, rule, _measure(before, after))
        self._record_before(site, module, before)

    def _record_before(self, site: Site, module: nn.Module | None, before: Tensor) -> None:
        mode = Mode.GRAD if is_in_backward() else mode_now()
        if (site, mode) not in self._recorders:
            named = replace(site.value, keys=(*site.keys, BEFORE))
            self._recorders[site, mode] = self._factory.make_named_recorder(mode, module, named, BEFORE)
        recorder = self._recorders[site, mode]
        if recorder is None:
            return
        if site.quantity == "value":
            recorder.record(before)
        elif recorder.wants_gradient:
            scale = self._backward.scale
            recorder.see_gradient(before if scale is None else before * scale.to(before.device))


@torch.no_grad()
def _measure(before: Tensor, after: Tensor) -> Tensor:
    """‖after − before‖ / ‖before‖, and 0 where nothing has changed: a scalar in float32."""
    wide = torch.promote_types(before.dtype, torch.float32)  # a difference, too, may be too large for half precision
    old, new = before.detach().to(wide), after.detach().to(wide)
    change = norm(new - old)
    share = change / norm(old)
    return torch.where(change == 0, 0.0, share).float()
