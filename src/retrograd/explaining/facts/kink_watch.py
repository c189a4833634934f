"""Where training meets points at which a function has no derivative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.history.facts import Kink
from retrograd.core.hooks.calls import running_module
from retrograd.core.hooks.nodes import name_of, number_of, root_edges
from retrograd.core.hooks.reach import find_nodes, guard_nodes
from retrograd.core.hooks.torch_calls import user_line
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.explaining.kinks.look import Look, Sighting
from retrograd.explaining.kinks.point import Point, key_of


@dataclass(frozen=True, slots=True, eq=False)
class _CountedSighting:
    """A sighting without its elements.

    Attributes:
        point: the kind of point.
        count: how many elements lie there; on their device.
        total: of how many.
        module: the path of the module that called.
        line: from where.
    """

    point: Point
    count: Tensor
    total: int
    module: str
    line: str


class KinkWatch(FactSource):
    """Observes every operation between a forward and its backward, at the few sampled steps.

    Elements are counted on their device, and it is asked for the counts when the pass has run.
    """

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._look: Look | None = None
        self._seen: dict[int, list[_CountedSighting]] = {}
        self._reached: list[tuple[str, _CountedSighting]] = []

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """Start watching, at a sampled step; what a forward without a backward has shown is dropped."""
        if self._look is None and self.host.is_look and torch.is_grad_enabled():
            self._seen.clear()
            self._look = Look(self._see)
            self._look.put_on()

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        """Stop watching, and keep what is a part of this graph."""
        self._look_no_more()
        if self._seen:
            reach = find_nodes(root_edges([root for root in roots if root.requires_grad]))
            guard_nodes(reach.nodes, reach.links)
            for node in reach.nodes:
                name = name_of(node)
                seen = self._seen.get(number_of(node), ())
                self._reached += [(name, each) for each in seen if key_of(name) in each.point.keys]
        self._seen.clear()

    def backward_ends(self, failed: bool) -> None:
        """Emit the facts."""
        for node, each in self._reached:
            count = int(each.count)
            if count:
                self.host.note_fact(_make_fact(node, each, count))
        self._reached.clear()

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """A step without a backward that was reported: nothing of it is kept."""
        self._look_no_more()

    def end(self) -> None:
        """Leave nothing behind."""
        self._look_no_more()
        self._seen.clear()
        self._reached.clear()

    def _look_no_more(self) -> None:
        if self._look is not None:
            self._look.take_off()
            self._look = None

    def _see(self, sighting: Sighting) -> None:
        try:
            self._note(sighting)
        except Exception as error:  # an operation of the program's is under way
            self.host.fault("kinks", error)

    def _note(self, sighting: Sighting) -> None:
        module = running_module()
        path = self.host.models.path_of(module) if module is not None else None
        mask = sighting.lie_there
        seen = _CountedSighting(sighting.point, mask.sum(), mask.numel(), path or "", user_line())
        self._seen.setdefault(sighting.number, []).append(seen)


def _make_fact(node: str, seen: _CountedSighting, count: int) -> Kink:
    point = seen.point
    return Kink(
        name=seen.module,
        value=float(count),
        node=node,
        line=seen.line,
        operation=point.operation,
        where=point.where,
        convention=point.convention.value,
        gives=point.gives,
        total=seen.total,
        finite=point.is_finite,
        is_usual=point.is_usual,
    )
