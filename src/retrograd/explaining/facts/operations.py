"""Operations between a forward and its backward pass.

To record them is expensive, and most steps make the same graph. So they are recorded at the first two recorded steps,
and then at the step behind a sampled one at which a graph is met that is unlike all those that were recorded.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from retrograd.core.groups import reach
from retrograd.core.history.facts import MADE_BEFORE, GraphSize, Operation, Operations
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.dispatch import is_in_compiled_call
from retrograd.core.hooks.engine import grad_enabled, is_in_backward, is_transformed
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.reach import GraphOutline, NodeSign, outline_graph, sign_node
from retrograd.core.hooks.torch_calls import TorchCall
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.core.sites.site import ROOT
from retrograd.explaining.facts.loss_looks import LossLooks
from retrograd.explaining.facts.operation_notes import OperationNotes
from retrograd.explaining.facts.softmax_looks import SoftmaxLooks
from retrograd.explaining.facts.target_looks import TargetLooks
from retrograd.explaining.facts.value_look import ValueLook
from retrograd.explaining.facts.variables import find_holder
from retrograd.explaining.facts.zero_gradients import NodeOperations

MOST = 3000
"""Operations of a look."""

_MOST_PASSES = 8
"""Backward passes between two updates of which operations are noted."""

ALWAYS = 2
"""Recorded steps at which operations are noted, whatever they are."""

_MOST_GRAPHS = 256
"""Graphs that are remembered."""

LOOKS: tuple[Callable[[FactHost], ValueLook], ...] = (SoftmaxLooks, LossLooks, TargetLooks, NodeOperations.of)
"""What is shown the values of operations while they are noted."""

_REMEMBERED = 16
"""Graphs that are known, the last written; a step may have several, such as those of two models in turn."""


class ForwardOperations(FactSource):
    """Records operations from the start of a forward to the next update, and writes them at each backward pass.

    Where no pass comes they are written when the forward has failed, an update is made without one, or recording ends.
    """

    rests = True

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._looks = [make(host) for make in LOOKS]
        self._notes = OperationNotes(
            host.models.path_of, MOST, lambda error: host.fault("operations", error), [self._show]
        )
        self._sizes = GraphSizes(host)
        self._written: deque[int] = deque(maxlen=_REMEMBERED)
        self._name = ""
        """Of the first model that may train; what is evaluated before it, as a teacher, is noted with it."""
        self._evaluated: set[str] = set()
        self._outputs: list[int] = []
        self._passes = self._thread = self._step = 0
        self._is_waiting = self._is_paused = False
        """A forward was noted, and no pass has come since; an optimizer updates."""
        self._losses: list[int] = []
        self._graphs: set[int] = set()
        self._next = -1
        """Recorded steps before that at which the next operations are noted."""

    def _show(self, number: int, noted: Operation, call: TorchCall) -> None:
        """Show an operation to the looks, but for what is only evaluated: no pass comes of it."""
        if self._name:
            for look in self._looks:
                look.see(number, noted, call)

    def begin(self) -> None:
        """Recording begins."""
        backward_followers.add(self)

    def run_begins(self, run: EngineRun) -> None:
        """Go on behind a pass that gives gradients to the program: a loss may be made of them, as a penalty."""
        if not run.accumulates and not run.is_nested and threading.get_ident() == self._thread:
            self._is_waiting = self._notes.is_started

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """Do nothing."""

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """Begin to note; go on where models are called one after the other."""
        if self._is_paused:  # a closure of the optimizer calls the model
            self._stop()
        notes, path = self._notes, self.host.models.path_of(model) or ROOT
        is_over = not self._is_waiting or self.host.step != self._step or len(notes.noted) > MOST // 2
        if notes.is_started and (is_over or (path in self._evaluated and not self._name)):
            self._stop()
        if not self._is_time():
            self._passes = 0
        elif not notes.is_started and self._passes < _MOST_PASSES and not is_in_compiled_call():
            self._thread, self._step = threading.get_ident(), self.host.step
            notes.begin()
        self._is_waiting = notes.is_started
        if self._is_waiting:
            if grad_enabled() or model.training:
                self._name = self._name or path
            self._evaluated.add(path)
            notes.forward_begins()

    def _is_time(self) -> bool:
        host = self.host
        if host.is_look and (host.recorded < ALWAYS or any(look.is_wanted for look in self._looks)):
            return True
        return host.recorded == self._next and host.is_recorded

    def forward_ends(self, model: nn.Module, output: Any, failed: bool) -> None:
        """Mark what it returned."""
        if self._is_waiting:
            self._outputs += [self._notes.find(tensor) for _, tensor in flatten(output, ())]
            self._notes.forward_ends()
            if not model.training:
                self._forget()
            if failed:
                self._stop()

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """Write them."""
        is_noted = self._notes.is_started
        graph = self._sizes.measure(roots, self._notes if is_noted else None)
        if graph is not None:
            self._compare(graph.kinds, is_noted=is_noted)
        if is_noted:
            self._passes += 1
            self._is_waiting = False
            nodes = None if graph is None else graph.nodes
            loss = self._notes.find(roots[0]) if roots else MADE_BEFORE
            self._losses.append(loss)
            self._write(loss, nodes)
            for look in self._looks:
                look.pass_begins(self._notes.noted, loss)
            self._notes.forward_ends()

    def _compare(self, graph: int, *, is_noted: bool) -> None:
        """Record operations at the next recorded step if this graph is unlike all whose operations were noted."""
        if is_noted:
            if len(self._graphs) >= _MOST_GRAPHS:
                self._graphs.clear()
            self._graphs.add(graph)
        elif graph not in self._graphs and self.host.is_look:
            self._next = self.host.recorded + 1

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop noting after a forward. Within a pass no mode can be taken off: then the next forward does it."""
        if threading.get_ident() == self._thread and not is_in_backward():
            self._passes = 0
            if self._is_part_left():
                self._notes.stop()
                self._is_paused = True
            else:
                self._stop()

    def update_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on where another loss is to come of what has run."""
        is_paused, self._is_paused = self._is_paused, False
        if is_paused and not self._notes.is_started:
            self._notes.start()

    def _is_part_left(self) -> bool:
        """Check whether a part of the models has run of which no pass has come, as of an actor beside its critic."""
        noted = self._notes.noted
        if not self._notes.is_started or self._is_waiting:
            return False

        def have_nodes(numbers: Iterable[int]) -> list[int]:
            return [each for each in numbers if each >= 0 and noted[each].node]

        reached = reach(have_nodes(self._losses), lambda number: have_nodes(noted[number].operands))
        ran = {each.module.partition(".")[0] for each in noted if each.node}
        return bool(ran - {noted[each].module.partition(".")[0] for each in reached} - {""})

    def drain(self) -> None:
        """Record what was seen of values."""
        for look in self._looks:
            look.drain()

    def end(self) -> None:
        """Leave nothing on the stack."""
        backward_followers.remove(self)
        self._stop()

    def _stop(self) -> None:
        is_paused, self._is_paused = self._is_paused, False
        if self._notes.is_started or is_paused:
            if self._is_waiting and self._name:
                self._write(MADE_BEFORE, None)
            self._notes.end()
            self._forget()
            self._name = ""
            self._evaluated.clear()
            self._outputs.clear()
            self._losses.clear()
            self._is_waiting = False

    def _forget(self) -> None:
        for look in self._looks:
            look.forget()

    def _write(self, loss: int, nodes: int | None) -> None:
        noted = self._notes.noted
        outputs = tuple(sorted({each for each in self._outputs if each >= 0}))
        signature = hash((self._name, outputs, loss, *map(_outline, noted)))
        if noted and signature not in self._written:
            self._written.append(signature)
            self.host.tell_operations(self._notes)
            value = float("nan") if nodes is None else float(nodes)
            used = {each for one in noted for each in one.operands}
            self.host.note_fact(
                Operations.pack(
                    noted,
                    name=self._name,
                    value=value,
                    outputs=outputs,
                    loss=loss,
                    is_cut=self._notes.is_cut,
                    dropped=tuple(each for each in self._notes.dropped if each not in used),
                )
            )


def _outline(noted: Operation) -> tuple[Any, ...]:
    """Key of an operation: without sizes, and without numbers that it is called with."""
    kinds = tuple((each.partition("[")[0], each.count(",")) for each in (*noted.takes, *noted.makes))
    operands = str(noted.operands)  # as text, for −1 and −2 have the same hash
    return noted._replace(operands=(), takes=(), makes=(), arguments=""), operands, kinds


# ---- sizes of graphs ----

MOST_NODES = 200_000
"""Beyond it nodes are not counted."""

_FIRST = 8
"""Recorded passes of which every one is looked at."""


_MOST_SIGNED = 20_000
"""Nodes of a graph of which each is watched; of a larger one its root alone."""


_KEPT, _MOST_SEARCHES = 8, 3
"""Graphs of earlier steps that are held when their holder is searched for, and how often that is done."""


class GraphSizes:
    """Watches each recorded pass, and measures graphs at looks and at the first passes. It holds none."""

    def __init__(self, host: FactHost) -> None:
        self._host = host
        self._signs: list[ref[NodeSign]] = []  # without callbacks, which would run within compiled code
        self._count = self._living = 0
        self._parts = GraphParts()
        self._searches = _MOST_SEARCHES

    def measure(self, roots: tuple[torch.Tensor, ...], notes: OperationNotes | None) -> GraphOutline | None:
        """A pass begins; returns the outline of its graph, where operations were noted, or it is time."""
        nodes = [node for root in roots if not is_transformed(root) and (node := root.grad_fn) is not None]
        if not nodes or not self._host.is_recorded:
            return None
        self._count += 1
        is_wanted = notes is not None or self._count <= _FIRST or self._host.is_look
        outline = self._measure(nodes, notes) if is_wanted else None
        self._signs.append(ref(sign_node(nodes[0])))
        if len(self._signs) > 2 * self._living + _FIRST:
            self._count_living()
        return outline

    def _count_living(self) -> int:
        """Count the graphs that are still held, and forget those that are gone."""
        self._signs = [sign for sign in self._signs if sign() is not None]
        self._living = len(self._signs)
        return self._living

    def _measure(self, nodes: list[Any], notes: OperationNotes | None) -> GraphOutline:
        outline = outline_graph(nodes, MOST_NODES, self._parts.look, _MOST_SIGNED)
        held = self._parts.add(outline.signs, notes)
        ring, line = "", ""
        if outline.rings:
            number, ring = outline.rings[0]
            made = None if notes is None else notes.made_by(number)
            line = "" if made is None else made.line
        alive = self._count_living()
        variable, stored = self._find_holder(outline) if max(alive, held.parts) >= _KEPT else ("", "")
        self._host.note_fact(
            GraphSize(
                value=float(outline.nodes), alive=alive, variable=variable, stored=stored, ring=ring, ring_line=line,
                **held._asdict(),
            )
        )  # fmt: skip
        return outline

    def _find_holder(self, outline: GraphOutline) -> tuple[str, str]:
        """The variable that holds graphs of earlier steps, and where it is stored."""
        fresh = [sign.number for each in outline.signs if (sign := each()) is not None]
        if not fresh or not self._searches:
            return "", ""
        self._searches -= 1
        return find_holder(sys._getframe(1), min(fresh))


class HeldParts(NamedTuple):
    """What is held of graphs that were measured before: see :class:`~retrograd.core.history.facts.GraphSize`."""

    looks: int
    parts: int
    held: str = ""
    module: str = ""
    line: str = ""


class GraphParts:
    """Watches the nodes of the graphs that were measured: of which of them is a part still held at the next look?

    What is part of a later graph, too, is no part of an earlier one any more.
    """

    def __init__(self) -> None:
        self.look = 0
        self._signs: dict[int, list[ref[NodeSign]]] = {}
        self._operations: dict[int, Operation] = {}
        """Number of a node of a graph of which operations were noted → the operation; while the node is held."""

    def add(self, signs: list[ref[NodeSign]], notes: OperationNotes | None) -> HeldParts:
        """A graph was measured, of which these nodes are signed."""
        living = {look: kept for look, each in self._signs.items() if (kept := _list_living(look, each))}
        newest = [max(kept, key=lambda sign: sign.number) for kept in living.values()]
        found = HeldParts(self.look, len(living))
        known = next((made for sign in newest if (made := self._operations.get(sign.number)) is not None), None)
        if known is not None:
            found = found._replace(held=known.name, module=known.module, line=known.line)
        elif newest:
            found = found._replace(held=newest[0].kind)
        numbers = {sign.number for kept in living.values() for sign in kept}
        self._signs = {look: self._signs[look] for look in living} | {self.look: signs}
        self._operations = {each: made for each, made in self._operations.items() if each in numbers}
        if notes is not None:
            fresh = [sign.number for each in signs if (sign := each()) is not None]
            self._operations |= {each: made for each in fresh if (made := notes.made_by(each)) is not None}
        self.look += 1
        return found


def _list_living(look: int, signs: list[ref[NodeSign]]) -> list[NodeSign]:
    """Signs of nodes that are still there, and in no later graph; what is gone is left out from now on."""
    living = [(each, sign) for each in signs if (sign := each()) is not None]
    signs[:] = [each for each, _ in living]
    return [sign for _, sign in living if sign.look == look]
