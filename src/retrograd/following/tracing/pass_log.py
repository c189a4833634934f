"""The notes of one backward pass, and the events that are made of them later.

While it runs, six things are noted a node. When it has ended, what the nodes can tell of themselves is fetched, for
the graph may be freed next. Texts are made only when somebody asks for the events. All lists are flat: one tuple a node
would wake the garbage collector all the time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple

from torch import Tensor

from retrograd.core.hooks.engine import count_function_modes, current_node, uncompiled
from retrograd.core.hooks.nodes import LEAF_NUMBER, inputs_of, is_leaf, names_of
from retrograd.core.hooks.reach import Reach, number_nodes, read_links
from retrograd.following.graph.node import Line, TensorInfo
from retrograd.following.graph.origins import Origins
from retrograd.following.graph.walker import describe_tensor, shape_of
from retrograd.following.tracing.trace import BackwardPass, NodeEvent

FindPlace = Callable[[int, int], tuple[str | None, int, Line | None]]
"""From a node's number and the thread that asked for the pass to module, call and line."""

NameLeaf = Callable[[Tensor], str | None]
Mark = Callable[[Any], None]

_MARKS = 6
"""Noted for each node: when it began, in which thread, its identity; shape, dtype and device of the gradient that came
in, or what torch says of all that came (None for none), and twice None."""


class Marks(NamedTuple):
    """Functions to be called just before a node runs, with the gradients that come in.

    Attributes:
        one: for a node that takes one gradient, with that.
        several: for a node that takes several, with all of them.
        leaf: for a leaf's node, with all of them.
    """

    one: Mark
    several: Mark
    leaf: Mark


class PassLog:
    """The log of one pass.

    Attributes:
        number, depth, thread: see :class:`BackwardPass`.
        levels: bytes in use when each node began, and when the pass ended; empty where that is not asked for.
        norms: identity of a node → norms of what came in, and of what went out.
        bundles: identity of a node → its replay bundle.
        current: what came in to the node that began last; nothing of what came in to a leaf's, which would be copied
            then instead of becoming ``.grad``.
        has_ended: the node that began last has run to its end though the pass has failed.
    """

    def __init__(self, number: int, depth: int) -> None:
        self.number = number
        self.depth = depth
        self.thread = get_ident()
        self.levels: list[int] = []
        self.norms: dict[int, tuple[Sequence[Any], Sequence[Any]]] = {}
        self.bundles: dict[int, str] = {}
        self.current: list[Any] = [None]
        self.failed = self.has_ended = False
        self.begin = time.perf_counter_ns()
        self.end = 0
        self._meter: Callable[[], int] | None = None
        self._marks: list[Any] = []
        self._names: list[str] = []
        self._numbers = self._identities = self._links = array("Q")
        self._parameters: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._marks) // _MARKS

    def make_marks(self, meter: Callable[[], int] | None) -> Marks:
        """Make the functions to be called just before a node runs.

        Args:
            meter: says how many bytes are in use, where that is asked for.
        """
        self._meter = meter
        note, current, clock = self._marks.extend, self.current, time.perf_counter_ns

        @uncompiled
        def mark(incoming: Any) -> None:
            node = current_node()
            described: Any = inputs_of(node)
            if type(incoming) is tuple:
                described = [None if gradient is None else one for gradient, one in zip(incoming, described)]  # noqa: B905
            note((clock(), get_ident(), id(node), described, None, None))
            current[0] = incoming

        @uncompiled
        def mark_one(incoming: Any) -> None:
            try:
                note((clock(), get_ident(), id(current_node()), incoming.shape, incoming.dtype, incoming.device))
            except (AttributeError, RuntimeError):  # None, or a nested tensor, which has no shape
                mark((incoming,))
            else:
                current[0] = incoming

        @uncompiled
        def mark_leaf(incoming: Any) -> None:
            mark(None)

        # Where a function mode is on, it would be called for every attribute of a gradient that we look at.
        marks = Marks(mark if count_function_modes() else mark_one, mark, mark_leaf)
        return marks if meter is None else Marks(*(self._with_level(each, meter) for each in marks))

    def last_node(self) -> int:
        """Identity of the node that began last."""
        return int(self._marks[2 - _MARKS])

    def begun(self) -> set[int]:
        """Identities of the nodes that have begun."""
        return set(self._marks[2::_MARKS])

    def learn(self, reach: Reach, name_leaf: NameLeaf) -> None:
        """Query the nodes for what they are; they may be freed after the pass."""
        if self._identities:
            return
        nodes = reach.nodes
        self._links = reach.links
        self._identities = array("Q", map(id, nodes))
        self._numbers = number_nodes(nodes)
        self._names = names_of(nodes)
        for node in filter(is_leaf, nodes):
            name = name_leaf(node.variable)
            if name is not None:
                self._parameters[id(node)] = name

    def close(self, *, failed: bool) -> None:
        """The pass has ended."""
        self.end = time.perf_counter_ns()
        self.failed = failed
        if self._meter is not None:
            self.levels.append(self._meter())
        if failed:
            self._forget_repeated()

    def _forget_repeated(self) -> None:
        """Record each node once: in a graph that an earlier pass has freed, the hooks of that pass are there still."""
        seen: set[int] = set()
        for index, node in reversed([*enumerate(self._marks[2::_MARKS])]):
            if node in seen:
                del self._marks[(index + 1) * _MARKS : (index + 2) * _MARKS]
                del self.levels[index + 1 : index + 2]
            seen = {node}

    def summary(self) -> BackwardPass:
        """The pass as plain data."""
        return BackwardPass(self.number, self.depth, self.thread, self.begin, self.end, self.failed)

    def events(self, find_place: FindPlace) -> list[NodeEvent]:
        """Events, one for each node that began."""
        describe = EventDescriber(self, find_place, self._read_incoming())
        return [describe.event(index, end) for index, end in enumerate(self._find_ends())]

    def describe_while_running(self, nodes: Sequence[Any], find_place: FindPlace) -> EventDescriber:
        """Make a describer that works before the pass has ended."""
        return EventDescriber(self, find_place, {id(node): inputs_of(node) for node in nodes})

    def _read_incoming(self) -> dict[int, tuple[Any, ...]]:
        return dict(zip(self._marks[2::_MARKS], map(self.incoming_at, range(len(self))), strict=True))

    def incoming_at(self, index: int) -> tuple[Any, ...]:
        """The gradients that came in to the node that began at this place in the pass."""
        shape, dtype, device = self._marks[index * _MARKS + 3 : index * _MARKS + 6]
        return tuple(shape) if dtype is None else ((shape, dtype, device),)

    def _with_level(self, mark: Mark, meter: Callable[[], int]) -> Mark:
        note = self.levels.append

        @uncompiled
        def mark_level(incoming: Any) -> None:
            note(meter())
            mark(incoming)

        return mark_level

    def _find_ends(self) -> list[int]:
        """A node ends when the next one begins in its thread, or with the pass."""
        ends = [self.end] * len(self)
        previous: dict[int, int] = {}
        for index, (begin, thread) in enumerate(zip(self._marks[::_MARKS], self._marks[1::_MARKS], strict=True)):
            if thread in previous:
                ends[previous[thread]] = begin
            previous[thread] = index
        return ends


class EventDescriber:
    """Makes events of one log.

    Args:
        log: to be described.
        find_place: where nodes were made.
        incoming: identity of a node → shape, dtype and device of each gradient that it takes, or what torch says of it.
    """

    def __init__(self, log: PassLog, find_place: FindPlace, incoming: dict[int, tuple[Any, ...]]) -> None:
        self._log = log
        self._find_place = find_place
        self._incoming = incoming
        self._places = {identity: place for place, identity in enumerate(log._identities)}
        self._edges = list(read_links(log._links))
        self._infos: dict[Any, TensorInfo] = {}

    def event(self, index: int, end: int = 0) -> NodeEvent:
        """Describe the node that began at this place in the pass; it ends now, unless its end is given."""
        log = self._log
        begin, thread, node = log._marks[index * _MARKS : index * _MARKS + 3]
        place = self._places[node]
        number = log._numbers[place]
        is_leaf = number == LEAF_NUMBER
        module, call, line = (None, 1, None) if is_leaf else self._find_place(number, log.thread)
        norms = log.norms.get(node)
        raised = log.failed and not log.has_ended and index == len(log) - 1
        return NodeEvent(
            name=log._names[place],
            number=None if is_leaf else number,
            module=module,
            call=call,
            line=line,
            parameter=log._parameters.get(node),
            run=log.number,
            thread=thread,
            begin=begin,
            end=end or time.perf_counter_ns(),
            incoming=tuple(map(self._info, log.incoming_at(index))),
            outgoing=tuple(None if raised else self._outgoing(edge) for edge in self._edges[place]),
            memory=log.levels[index + 1] - log.levels[index] if index + 1 < len(log.levels) else None,
            norms_in=norms and _read(norms[0]),
            norms_out=norms and _read(norms[1]),
            raised=raised,
            bundle=log.bundles.get(node),
        )

    def _outgoing(self, edge: tuple[int, int] | None) -> TensorInfo | None:
        if edge is None:
            return None
        place, slot = edge
        incoming = self._incoming.get(self._log._identities[place], ())
        return self._info(incoming[slot]) if slot < len(incoming) else None

    def _info(self, described: Any) -> TensorInfo | None:
        if described is None:
            return None
        is_key = isinstance(described, tuple)
        key = described if is_key else (shape_of(described), described.dtype, described.device)
        info = self._infos.get(key)
        if info is None:
            info = self._infos[key] = describe_tensor(*key)
        return info


def place_finder(origins: Origins | None) -> FindPlace:
    """Make a function that finds where a node was made: most likely by the thread that asked for the pass."""

    def find(number: int, thread: int) -> tuple[str | None, int, Line | None]:
        origin = origins and (origins.find(number, thread) or origins.find(number))
        return (origin.module, origin.call, origin.line) if origin else (None, 1, None)

    return find


def _read(norms: Sequence[Any]) -> tuple[float | None, ...]:
    return tuple(None if norm is None else float(norm) for norm in norms)
