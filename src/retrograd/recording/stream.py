"""A stream: what becomes of the tensors of one site. Statistics go into a row, the tensor itself into the lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from retrograd.hooks.distributed import is_sharded, local_part
from retrograd.hooks.engine import is_transformed
from retrograd.recording.keep import Keep
from retrograd.recording.lane import Lane, Mode
from retrograd.recording.placements import Placements
from retrograd.recording.tensor_keeper import TensorKeeper
from retrograd.sites.site import Site
from retrograd.statistics.slab import UnreadableTensorError

NO_ROW = -1

Observe = Callable[[torch.Tensor, int], Any]


class StreamHost(Protocol):
    """What a stream needs of its recorder."""

    keeper: TensorKeeper
    placements: Placements

    def fault(self, site: Site, error: Exception) -> None:
        """Told of an error at a tap; training goes on."""


class Stream:
    """Takes in the tensors of one site.

    Args:
        lane: where rows and kept tensors go.
        site: the site.
        row: the site's row, or ``NO_ROW``.
        keep: the policy that keeps its tensors, or None.
        copy: its memory is used again (parameters and their gradients), so a kept tensor must be a copy.
        host: asked for room, and told when a user's statistic raises.
    """

    __slots__ = ("_copy", "_host", "_lane", "custom", "keep", "name", "observe", "row", "site")

    def __init__(self, lane: Lane, site: Site, row: int, keep: Keep | None, *, copy: bool, host: StreamHost) -> None:
        self._lane = lane
        self._host = host
        self._copy = copy or lane.mode is Mode.INFERENCE or (keep is not None and keep.copies)
        self.site = site
        self.name = str(site)
        self.row = row
        self.keep = keep
        self.custom = lane.custom if row >= 0 else None
        self.observe: Observe | None = None

    def bind(self, tensor: torch.Tensor) -> Observe:
        """The slab's method for tensors like this one, remembered in ``observe``."""
        self.observe = self._lane.slab(tensor.device).observe
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
            self._lane.slab(new.device).observe_update(new, old, self.row)
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
            self._lane.kept.append((self, kept, version, size))
