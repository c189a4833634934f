"""What other ranks hold of each site, so that readers know how to merge them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from retrograd.hooks.distributed import (
    Placement,
    PlainPlacements,
    find_tensor_parallel_ranks,
    has_other_processes,
    is_sharded,
    place_copies,
    place_own,
    place_spread,
)
from retrograd.sites.site import Site, local_gradient


class Placements:
    """Finds the placement of each site when its first tensor is seen, and tells all of them in one go.

    Where there is one process alone nothing is found, and nothing told.

    Args:
        tell: takes all facts, the stages of models by name and placements by printed site, whenever there are new ones.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._found: dict[Site, Placement] = {}
        self._stages: dict[str, int] = {}
        self._is_told = True
        self._plain = PlainPlacements(())

    def add_model(self, model: nn.Module) -> None:
        """This model is recorded."""
        if has_other_processes():
            self._plain = PlainPlacements(self._plain.ranks or find_tensor_parallel_ranks(model))

    def see(self, site: Site, tensor: Tensor) -> None:
        """An activation is seen for the first time; its gradient is taken to lie as it does."""
        if has_other_processes() and not is_sharded(tensor):  # of the others each tensor tells itself
            placement = self._place_plain(tensor)
            if placement is not None:
                self._add(site.value, placement)
                self._add(site.grad, placement)

    def see_spread(self, site: Site, tensor: Tensor) -> None:
        """A ``DTensor`` is recorded for the first time."""
        self._add(site, place_spread(tensor))

    def see_parameter(self, site: Site, parameter: Tensor, copies: tuple[int, ...]) -> None:
        """A parameter is watched, or found to be in a wrapper that keeps it the same in these processes."""
        if not has_other_processes():
            return
        beside = self._plain.ranks
        placement = place_spread(parameter, beside) if is_sharded(parameter) else place_copies({*copies, *beside})
        for each in (site, site.grad, site.update):
            self._add(each, placement)
        self._add(local_gradient(site), place_own())

    def _place_plain(self, tensor: Tensor) -> Placement | None:
        if not self._plain.ranks:
            return place_own()
        return self._plain.place(tensor) if tensor.grad_fn is not None else None

    def set_stage(self, model: str, stage: int) -> None:
        """The model of this name is a stage of a pipeline."""
        if self._stages.get(model) != stage:
            self._stages[model] = stage
            self._is_told = False

    def flush(self) -> None:
        """Tell what is new."""
        if not self._is_told:
            self._is_told = True
            sites = {str(site): _describe(placement) for site, placement in self._found.items()}
            self._tell({"stages": dict(self._stages), "sites": sites})

    def _add(self, site: Site, placement: Placement) -> None:
        if self._found.get(site) != placement:
            self._found[site] = placement
            self._is_told = False


def _describe(placement: Placement) -> dict[str, Any]:
    spec = {"placements": placement.spec} if placement.spec else {}
    return {"holds": placement.holds, "ranks": list(placement.ranks), **spec}
