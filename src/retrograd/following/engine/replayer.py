"""``rg.run_from``: an engine of our own, which runs any stretch of a live graph again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from retrograd.core.errors import ReplayError
from retrograd.core.hooks.node_tap import NodeGradients
from retrograd.core.hooks.nodes import edges_of, is_leaf, name_of, number_of, root_edges, run_node, variable_of
from retrograd.core.hooks.reach import find_leading, find_nodes, guard_nodes
from retrograd.following.engine.one_node import (
    CaughtGradients,
    InputBuffer,
    add,
    add_to_grad,
    arrange,
    check_number,
    note,
    wanted_by,
)
from retrograd.following.graph.graph import ReadyQueue
from retrograd.following.graph.walker import describe


def run_from(
    start: Any, incoming: Any = None, *, to: Any = None, accumulate: bool = False, create_graph: bool = False
) -> Gradients:
    """Run a stretch of a backward graph with an engine of our own, and leave the graph as it is.

    Nodes are called one by one, the newest first; each runs when all that leads to it from the starts has run.
    Gradients are added up, summed over broadcast dimensions and cast as torch's engine does it, to the last bit. The
    graph is not freed, so it can be run as often as you like; the pass before needs ``retain_graph=True`` if it
    was one of torch's.

    It does **not** run hooks: neither those on tensors and nodes (so ``retain_grad`` keeps nothing), nor those that run
    after a ``.grad`` has changed, nor what is built of them: the reducers of ``DistributedDataParallel`` and FSDP,
    module backward hooks, optimizers in the backward. It knows no anomaly mode, runs in the calling thread, and
    on the current stream of each device. A node that runs a backward pass of its own (reentrant checkpointing) runs
    torch's engine there, with all of this.

    Args:
        start: a tensor, a node (``tensor.grad_fn``), or a list of them; or a dict of them with the gradients that come
            in: of a tensor its gradient, of a node a tuple with one for each result of its operation. Where one start
            leads to another, what arrives there is added to what is given.
        incoming: the gradients for ``start``, unless it is a dict; a list for a list. Ones for scalars by default.
        to: tensors or nodes to stop at; the rest of the graph does not run. By default all leaves.
        accumulate: whether to add to the ``.grad`` of the leaves. Otherwise none is touched, also not by nodes
            that run a pass of their own: what those would add counts for the leaf.
        create_graph: whether the run is recorded, for derivatives of it.

    Returns:
        Gradients by leaf, or by what ``to`` names. With ``accumulate``: the ``.grad`` of each leaf.

    Raises:
        ReplayError: gradients do not fit the starts, or ``to`` and ``accumulate`` do not go together.
        NoGraphError: a tensor has no graph.
        FreedGraphError: a backward pass has freed what a node had saved.
        Exception: whatever a node raises, with a note that says which one it was. What had been added to ``.grad``
            before stays there.
    """
    targets = Targets(to)
    if accumulate and not targets.are_leaves:
        raise ReplayError(
            "accumulate=True adds to the .grad of leaves, and `to` names something else.",
            repair="give leaves, or take the gradients from what is returned.",
        )
    run = _ReplayRun(targets, accumulate=accumulate)
    with torch.set_grad_enabled(create_graph):
        for node, gradients in _find_starts(start, incoming):
            run.begin(node, gradients)
        return run.finish()


class _PendingNode:
    """A node that has not run yet.

    Attributes:
        edges: where its gradients go.
        missing: how many edges lead to it from nodes that have not run.
        buffer: what has come in; None before the first.
    """

    __slots__ = ("buffer", "edges", "missing")

    def __init__(self, edges: Edges) -> None:
        self.edges = edges
        self.missing = 0
        self.buffer: InputBuffer | None = None

    def receive(self, node: Any, slot: int, gradient: Tensor) -> None:
        if self.buffer is None:
            self.buffer = InputBuffer(node)
        self.buffer.add(slot, gradient)

    def take(self, node: Any) -> NodeGradients:
        arrived, self.buffer = self.buffer or InputBuffer(node), None
        return tuple(arrived.gradients)


class _ReplayRun:
    """A run: first every start is given to ``begin``, then it is finished."""

    def __init__(self, targets: Targets, *, accumulate: bool) -> None:
        self._targets = targets
        self._accumulate = accumulate
        self._table: dict[Any, _PendingNode] = {}
        self._starts: list[tuple[Any, NodeGradients]] = []
        self._ready = ReadyQueue[Any]()
        self._leaves: dict[int, LeafGradient] = {}
        """Leaf's identity → the leaf, and its gradient."""

    def begin(self, node: Any, gradients: NodeGradients) -> None:
        self._starts.append((node, gradients))

    def finish(self) -> Gradients:
        self._look_ahead()
        with nullcontext() if self._accumulate else CaughtGradients(self._begin_with) as caught:
            for node in self._admit():
                self._release(node)
            while self._ready:
                node = self._ready.pop()
                self._run(node)
                if caught is not None:
                    for leaf, gradient in caught.settle():
                        if self._wants(leaf):
                            self._leaves[id(leaf)] = LeafGradient(leaf, gradient)
        if self._accumulate:
            self._leaves = {key: LeafGradient(leaf, leaf.grad) for key, (leaf, _) in self._leaves.items()}
        return self._targets.collect(self._leaves) if self._targets else Gradients(list(self._leaves.values()))

    def _look_ahead(self) -> None:
        """Find all nodes, and how many edges lead to each."""
        reach = find_nodes((node, 0) for node, _ in self._starts)
        self._table = {node: _PendingNode(edges_of(node)) for node in reach.nodes}
        for pending in self._table.values():
            for following, _ in pending.edges:
                if following is not None:
                    self._table[following].missing += 1
        guard_nodes(reach.nodes, reach.links)
        if self._targets:
            self._targets.needed = {reach.nodes[place] for place in find_leading(reach, self._targets.nodes)}

    def _admit(self) -> list[Any]:
        """Hand the starts their gradients; those to which no other leads can run."""
        for node, gradients in self._starts:
            for slot, gradient in enumerate(gradients):
                if gradient is not None:
                    self._table[node].receive(node, slot, gradient)
        return [node for node in dict.fromkeys(node for node, _ in self._starts) if not self._table[node].missing]

    def _release(self, node: Any) -> None:
        """All that leads to this node has run."""
        if is_leaf(node):
            self._end(node)
        else:
            self._ready.push(number_of(node), node)

    def _end(self, node: Any) -> None:
        arrived = self._table[node].take(node)
        leaf = variable_of(node)
        assert leaf is not None
        if self._targets:
            self._targets.record(node, arrived)
        self._reach(leaf, arrived[0])

    def _reach(self, leaf: Tensor, gradient: Tensor | None) -> None:
        if not self._wants(leaf):
            return
        before = self._found(leaf)
        if gradient is None:
            gradient = before
        elif self._accumulate:
            add_to_grad(leaf, gradient)
            gradient = None
        elif before is not None:
            gradient = add(before, gradient)
        self._leaves[id(leaf)] = LeafGradient(leaf, gradient)

    def _wants(self, leaf: Tensor) -> bool:
        return not self._targets or id(leaf) in self._targets.leaves

    def _found(self, leaf: Tensor) -> Tensor | None:
        return self._leaves[id(leaf)].gradient if id(leaf) in self._leaves else None

    def _begin_with(self, leaf: Tensor) -> Tensor | None:
        """The ``.grad`` that a pass inside a node finds: a copy of the sum so far, to add to."""
        found = self._found(leaf)
        return None if found is None else found.clone()

    def _run(self, node: Any) -> None:
        waiting = self._table[node]
        arrived = waiting.take(node)
        if self._targets:
            self._targets.record(node, arrived)
            if node not in self._targets.needed:
                return
        try:
            outgoing = run_node(node, arrived)
            if outgoing:
                check_number(node, outgoing, waiting.edges)
                self._hand_on(waiting.edges, outgoing)
        except Exception as error:
            note(error, node, arrived)
            raise

    def _hand_on(self, edges: Sequence[tuple[Any, int]], outgoing: Sequence[Tensor | None]) -> None:
        for (following, slot), gradient in zip(edges, outgoing, strict=False):
            if following is None or not self._targets.want(following):
                continue
            waiting = self._table[following]
            if gradient is not None:
                waiting.receive(following, slot, gradient)
            waiting.missing -= 1
            if not waiting.missing:
                self._release(following)


def _find_starts(start: Any, incoming: Any) -> Iterator[tuple[Any, NodeGradients]]:
    for key, gradients in _pair(start, incoming):
        node, slot = root_edges([key])[0]
        begins_with_one = gradients is None and not isinstance(start, Mapping)
        yield node, arrange(node, None if key is node else slot, _one(node, slot) if begins_with_one else gradients)


def _pair(start: Any, incoming: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(start, Mapping):
        if incoming is not None:
            raise ReplayError("Gradients are given twice.", repair="give them in the dict, and leave `incoming` out.")
        return start.items()
    if not is_several(start):
        return [(start, incoming)]
    several = [None] * len(start) if incoming is None else list(incoming)
    if len(several) != len(start):
        raise ReplayError(f"There are {len(several)} gradients for {len(start)} starts.", repair="give one for each.")
    return zip(start, several, strict=True)


def _one(node: Any, slot: int) -> NodeGradients:
    """The gradient that torch begins with where none is given: one."""
    expected = wanted_by(node)
    wanted = expected[slot]
    real = wanted.dtype is None or wanted.dtype.is_floating_point
    if wanted.shape is None or wanted.shape.numel() != 1 or not real:
        raise ReplayError(
            f"A run from {name_of(node)} needs a gradient to begin with.",
            repair="give `incoming`, of the kind " + str(wanted) + ".",
            reason="only for a single real number it is plain what that gradient is: one.",
        )
    one = torch.ones(wanted.shape, dtype=wanted.dtype, device=wanted.device)
    return tuple(one if place == slot else None for place in range(len(expected)))


# ---- gradients ----

_MOST_LINES = 20


class Gradients(Mapping[Any, Any]):
    """Gradients by what they arrived at: ``gradients[tensor]``, ``gradients[node]``.

    Keys are the leaves that were reached, or what ``to=`` asked for. Of a tensor it has a gradient, or None where none
    arrived; of a node a tuple with what came in to it, or None where it was not reached. Keys are told apart by
    identity.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: list[tuple[Any, Any]]) -> None:
        self._entries = {id(key): (key, value) for key, value in entries}

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._entries[id(key)][1]
        except KeyError:
            raise KeyError(_name(key)) from None

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def by_name(self, model: nn.Module) -> dict[str, Tensor | None]:
        """Gradients of those parameters of the model that are among the keys."""
        return {name: self[parameter] for name, parameter in model.named_parameters() if parameter in self}

    def __repr__(self) -> str:
        lines = [f"  {_name(key)}: {_name_value(value)}" for key, value in list(self.items())[:_MOST_LINES]]
        if len(self) > _MOST_LINES:
            lines.append(f"  and {len(self) - _MOST_LINES} more")
        return "\n".join([f"Gradients of {len(self)}", *lines])


def _name(key: Any) -> str:
    if isinstance(key, Tensor):
        return f"{'leaf' if key.is_leaf else 'tensor'} {describe(key)}"
    return name_of(key) if hasattr(key, "next_functions") else type(key).__name__


def _name_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_name_value, value))})"
    return "nothing" if value is None else str(describe(value))


# ---- targets ----

Edges = tuple[tuple[Any, int], ...]


class LeafGradient(NamedTuple):
    """The gradient of a leaf."""

    leaf: Tensor
    gradient: Tensor | None


class Targets:
    """The tensors and nodes that ``to`` names, and the gradients that have arrived there."""

    def __init__(self, to: Any) -> None:
        keys = [] if to is None else list(to) if is_several(to) else [to]
        if to is not None and not keys:
            raise ReplayError("`to` names nothing.", repair="give tensors or nodes, or leave it out for all leaves.")
        self._edges = [(key, *root_edges([key])[0]) for key in keys]
        self._arrived: dict[Any, NodeGradients] = {}
        self.needed: set[Any] = set()
        self.nodes = {node for _, node, _ in self._edges}
        self.are_leaves = all(isinstance(key, Tensor) and key.is_leaf for key in keys)
        self.leaves = {id(key) for key in keys if isinstance(key, Tensor) and key.is_leaf}

    def __bool__(self) -> bool:
        return bool(self._edges)

    def want(self, node: Any) -> bool:
        """Return whether gradients of this node are needed."""
        return not self._edges or node in self.needed or node in self.nodes

    def record(self, node: Any, arrived: NodeGradients) -> None:
        if node in self.nodes:
            self._arrived[node] = arrived

    def collect(self, leaves: dict[int, LeafGradient]) -> Gradients:
        return Gradients([(key, self._value(key, node, slot, leaves)) for key, node, slot in self._edges])

    def _value(self, key: Any, node: Any, slot: int, leaves: dict[int, LeafGradient]) -> Any:
        if id(key) in self.leaves:
            return leaves.get(id(key), LeafGradient(key, None)).gradient
        arrived = self._arrived.get(node)
        if arrived is None or key is node:
            return arrived
        return arrived[slot]


def is_several(given: Any) -> bool:
    """Return whether this is a list of tensors, nodes and gradient edges, not one of them."""
    return isinstance(given, list | tuple) and not isinstance(given, GradientEdge)
