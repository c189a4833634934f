"""Functions of torch's that keep what their forward computes and does not return, and are differentiated twice."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from retrograd.core.history.facts import CARRIED, LostPart, Operation
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.derived import may_differentiate
from retrograd.core.hooks.engine import next_sequence_number
from retrograd.core.hooks.nodes import holds, is_python, name_of, number_of, saved_tensors_of
from retrograd.core.hooks.reach import PassNodes, number_nodes
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.explaining.facts.operation_notes import OperationNotes

_IN_FUNCTION = "function"


class SecondDerivatives(FactSource):
    """Observes passes that make a graph of the gradients, where operations were noted, and at the pass behind each."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._notes: OperationNotes | None = None
        self._lost: list[LostPart] = []
        self._made = range(0)
        """Numbers of the nodes that the pass has made."""
        self._thread = 0
        self._told: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """Recording begins."""
        backward_followers.add(self)

    def end(self) -> None:
        """Recording ends."""
        backward_followers.remove(self)

    def operations_noted(self, notes: OperationNotes) -> None:
        """Operations before the pass that is about to begin are known."""
        self._notes = notes

    def forward_begins(self, model: Any, arguments: Any) -> None:
        """What was made before is not differentiated any more, or is of no interest."""
        self._notes = None

    def run_begins(self, run: EngineRun) -> None:
        """Find what a pass that makes a graph would lose; is that graph part of this one?"""
        notes, self._notes = self._notes, None
        if run.is_nested or run.is_batched or not (self._lost or (notes is not None and run.creates_graph)):
            return
        try:
            self._look(run, notes)
        except Exception as error:
            self._lost = []
            self.host.fault("second derivatives", error)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """Remember which nodes the pass has made."""
        if self._lost and not self._made and not run.is_nested and threading.get_ident() == self._thread:
            self._made = range(self._made.start, next_sequence_number())
            if error is not None:
                self._lost = []

    def _look(self, run: EngineRun, notes: OperationNotes | None) -> None:
        found = PassNodes(run)
        if self._lost and self._made and threading.get_ident() == self._thread:
            if any(number in self._made for number in number_nodes(found.reach.nodes)):
                self._tell()
            self._lost = []
        if notes is not None and run.creates_graph:
            self._lost = list(_list_lost(found.nodes, notes))
            self._made, self._thread = range(next_sequence_number(), 0), threading.get_ident()
        found.release()

    def _tell(self) -> None:
        for each in self._lost:
            key = each.name, each.line
            if key not in self._told:
                self._told.add(key)
                self.host.note_fact(each)


def _list_lost(nodes: Iterable[Any], notes: OperationNotes) -> Iterator[LostPart]:
    for node in nodes:
        if is_python(node) and not hasattr(node, "retrograd_call"):  # an rg.Function refuses it itself
            for _, raw in saved_tensors_of(node):
                held = holds(raw)
                number = notes.number_of(held) if isinstance(held, Tensor) else -1
                if number >= 0 and _is_derived(notes.noted, number):
                    made, call = notes.noted[number], notes.made_by(number_of(node))
                    yield LostPart(
                        name=name_of(node).removesuffix("Backward"),
                        operation=made.name,
                        line=made.line,
                        called="" if call is None else call.line,
                    )
                    break


def _is_derived(noted: Sequence[Operation], number: int) -> bool:
    """Return whether it was computed, within a forward of a Function, of something that has a graph."""
    waiting, seen = [number], {number}
    for each in waiting:  # which grows
        operation = noted[each]
        if operation.node or operation.mode != _IN_FUNCTION:
            if operation.node and each != number:
                return True
            continue
        if not may_differentiate(operation.name) or not operation.makes[:1] or "float" not in operation.makes[0]:
            continue
        if CARRIED in operation.operands:
            return True
        fresh = {operand for operand in operation.operands if operand >= 0} - seen
        seen |= fresh
        waiting += sorted(fresh)
    return False
