"""The gradients that a run of our own engine finds, and the places where it stops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from retrograd.errors import ReplayError
from retrograd.graph.walker import describe
from retrograd.hooks.nodes import name_of, root_edges

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

Arrived = tuple[Tensor | None, ...]
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
        self._arrived: dict[Any, Arrived] = {}
        self.needed: set[Any] = set()
        self.nodes = {node for _, node, _ in self._edges}
        self.are_leaves = all(isinstance(key, Tensor) and key.is_leaf for key in keys)
        self.leaves = {id(key) for key in keys if isinstance(key, Tensor) and key.is_leaf}

    def __bool__(self) -> bool:
        return bool(self._edges)

    def want(self, node: Any) -> bool:
        """Tell whether gradients of this node are needed."""
        return not self._edges or node in self.needed or node in self.nodes

    def record(self, node: Any, arrived: Arrived) -> None:
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
    """Tell a list of tensors, nodes and gradient edges from one of them."""
    return isinstance(given, list | tuple) and not isinstance(given, GradientEdge)
