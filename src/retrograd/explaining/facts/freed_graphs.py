"""A backward pass that is refused since an earlier one has freed a part of its graph: which part, and who holds it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from retrograd.core.groups import reach
from retrograd.core.history.facts import FreedPart
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.engine import next_sequence_number
from retrograd.core.hooks.nodes import is_freed, name_of, number_of, variable_of
from retrograd.core.hooks.reach import PassNodes, Reach, find_nodes, guard_nodes, read_links
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.explaining.facts.variables import find_variable

_REFUSED = "backward through the graph a second time"


class FreedGraphs(FactSource):
    """Records where such a graph was handed over. Nothing is done but to remember a number, until a pass is refused."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._made_before: dict[int, int] = {}
        """Thread → the number of the first node that was made after the last pass that has freed its graph."""

    def begin(self) -> None:
        """Recording begins; a pass may have run before."""
        self._made_before[threading.get_ident()] = next_sequence_number()
        backward_followers.add(self)

    def end(self) -> None:
        """Recording ends."""
        backward_followers.remove(self)

    def run_begins(self, run: EngineRun) -> None:
        """Do nothing."""

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """A pass has ended, or was refused."""
        if run.is_nested or run.is_batched:
            return
        if error is None:
            if not run.keeps_graph:
                self._made_before[threading.get_ident()] = next_sequence_number()
        elif isinstance(error, RuntimeError) and _REFUSED in str(error):
            try:
                self._explain(run)
            except Exception as fault:
                self.host.fault("freed graphs", fault)

    def _explain(self, run: EngineRun) -> None:
        found = PassNodes(run)
        before = self._made_before.get(threading.get_ident(), 0)
        old = _find_old(found.reach, before)
        if old:
            kept, left = _list_leaves(found.reach, set(old)), _list_leaves(found.reach, set())
            nodes = [found.reach.nodes[place] for place in old]
            held = find_variable(sys._getframe(1), lambda tensor: _is_made_by(tensor, nodes))
            newest = max(nodes, key=number_of) if held is None else held.tensor.grad_fn
            self.host.note_fact(
                FreedPart(
                    name="" if held is None else held.name,
                    value=float(len(old)),
                    node=name_of(newest),
                    line="" if held is None else held.line,
                    is_made_once=None if held is None else held.is_made_once,
                    leaves_something=bool(kept),
                    starves=self._name_leaves([found.reach.nodes[place] for place in left if place not in kept]),
                )
            )
        found.release()

    def _name_leaves(self, nodes: list[Any]) -> tuple[str, ...]:
        names = (self.host.name_parameter(leaf) for node in nodes if (leaf := variable_of(node)) is not None)
        return tuple(sorted(filter(None, names)))


def _is_made_by(tensor: Tensor, nodes: list[Any]) -> bool:
    return tensor.requires_grad and tensor.grad_fn in nodes


def _find_old(reach: Reach, before: int) -> list[int]:
    """Places of the nodes that were made before a pass freed its graph, lead to what is freed, and newer ones take."""
    old = {place for place, node in enumerate(reach.nodes) if number_of(node) < before}
    taken = set(_list_taken(reach, old))
    return [place for place in sorted(taken) if _is_freed_below(reach.nodes[place])]


def _list_taken(reach: Reach, old: set[int]) -> Iterator[int]:
    for place, edges in enumerate(read_links(reach.links)):
        if place not in old:
            yield from (edge[0] for edge in edges if edge is not None and edge[0] in old)


def _is_freed_below(node: Any) -> bool:
    below = find_nodes([(node, 0)])
    found = any(variable_of(each) is None and is_freed(each) for each in below.nodes)
    guard_nodes(below.nodes, below.links)
    return found


def _list_leaves(pass_reach: Reach, cut: set[int]) -> list[int]:
    """Places of the leaves that the pass would come to if it ended at these nodes."""
    edges = list(read_links(pass_reach.links))
    found = reach({0} - cut, lambda place: {edge[0] for edge in edges[place] if edge is not None} - cut)
    return [place for place in found if variable_of(pass_reach.nodes[place]) is not None]
