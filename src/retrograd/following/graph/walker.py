"""``rg.walk``: from roots to leaves, each node once, without recursion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from retrograd.core.errors import GraphError
from retrograd.core.hooks.names import walk_leaves, watched_name
from retrograd.core.hooks.nodes import (
    LEAF_NUMBER,
    SAVED_TENSOR,
    holds,
    inputs_of,
    is_leaf,
    is_saved_tensor,
    names_of,
    names_of_saved,
    number_of,
    read_saved,
    root_edges,
    variable_of,
)
from retrograd.core.hooks.reach import find_nodes, guard_nodes
from retrograd.following.graph.columns import Columns, Edges, Infos
from retrograd.following.graph.graph import Graph
from retrograd.following.graph.node import Edge, Line, Node, SavedValue, TensorInfo, count_nonfinite
from retrograd.following.graph.origin import latest_origins

if TYPE_CHECKING:
    from retrograd.following.graph.origins import Origins

Place = tuple[str | None, int, Line | None]

_NOWHERE: Place = (None, 1, None)
_LONGEST_TEXT = 80


def walk(
    roots: Any,
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    origins: Origins | None = None,
    saved: bool = True,
    names: Mapping[str, Tensor] | None = None,
) -> Graph:
    """Walk a backward graph; nothing in it is run, unpacked or changed.

    Args:
        roots: a tensor, gradient edge or node, or tuples, lists and dicts of them.
        model: names the leaves by its parameters.
        origins: where nodes were made, from :func:`record_origins`; by default those that were entered last, if they
            are still held, or nothing was asked of them before.
        saved: whether to look at what each operation saved; a walk takes half of the time without.
        names: names leaves that are no parameters: ``{"a": a}``. Those that were handed to ``rg.watch("a", a)`` have
            the name ``watch/a``.

    Returns:
        The graph, in which a node comes after the one it was found from.

    Raises:
        NoGraphError: a root has no graph.
    """
    edges = root_edges(roots)
    nodes, _, links = find_nodes(edges)
    columns = _Describer(origins or latest_origins.get(), name_leaves(model, names)).describe(nodes, links, saved=saved)
    guard_nodes(nodes, links)
    return Graph(columns, [Edge(nodes.index(node), slot) for node, slot in edges], nodes)


class _Describer:
    """Fills the columns of a graph; what is the same for many nodes is made once."""

    def __init__(self, origins: Origins | None, leaves: WeakTensorKeyDictionary) -> None:
        self._origins = origins
        self._leaves = leaves
        self._infos: dict[tuple[Any, ...], TensorInfo] = {}
        self._incoming: dict[tuple[Any, ...], Infos] = {}
        self._saved: dict[tuple[Any, ...], tuple[SavedValue, ...]] = {}
        self._places: dict[Place, Place] = {}

    def describe(self, nodes: Sequence[Any], links: Sequence[int], *, saved: bool) -> Columns:
        """Describe the nodes of a graph, and where each leads."""
        columns = Columns()
        numbers = list(map(number_of, nodes))
        columns.names = names_of(nodes)
        columns.numbers = [None if number == LEAF_NUMBER else number for number in numbers]
        columns.incoming = list(self._describe_incoming(nodes))
        columns.edges = Edges(links)
        columns.saved = list(map(self.describe_saved, nodes)) if saved else [()] * len(nodes)
        columns.places = list(map(self._find_place, numbers)) if self._origins else [_NOWHERE] * len(nodes)
        leaves = [(place, nodes[place]) for place, number in enumerate(numbers) if number == LEAF_NUMBER]
        named = ((place, self._name_leaf(node)) for place, node in leaves if is_leaf(node))
        columns.parameters = {place: name for place, name in named if name is not None}
        return columns

    def _name_leaf(self, node: Any) -> str | None:
        variable = variable_of(node)
        assert variable is not None
        name: str | None = self._leaves.get(variable)
        if name is None and self._origins is not None:
            name = self._origins.name_parameter(variable)
        return watched_name(variable) if name is None else name

    def _describe_incoming(self, nodes: Sequence[Any]) -> Iterator[Infos]:
        """Describe what comes in to each node. Written out for those, nearly all, that take one gradient."""
        known = self._incoming
        for node in nodes:
            described = inputs_of(node)
            key: tuple[Any, ...]
            if len(described) == 1:
                (one,) = described
                key = (None if one.is_nested_tensor else tuple(one.shape), one.dtype, one.device)
            else:
                key = tuple([_key_of(each) for each in described])
            found = known.get(key)
            if found is None:
                found = known[key] = tuple([self._info(_key_of(each)) for each in described])
            yield found

    def _info(self, key: tuple[Any, ...]) -> TensorInfo:
        info = self._infos.get(key)
        if info is None:
            info = self._infos[key] = describe_tensor(*key)
        return info

    def _find_place(self, number: int) -> Place:
        if self._origins is None or number == LEAF_NUMBER:
            return _NOWHERE
        origin = self._origins.find(number)
        if origin is None:
            return _NOWHERE
        place = (origin.module, origin.call, origin.line)
        return self._places.setdefault(place, place)

    def describe_saved(self, node: Any) -> tuple[SavedValue, ...]:
        kind = type(node)
        values = read_saved(kind, node)
        key = (kind, *map(_read, values))
        found = self._saved.get(key)
        if found is None:
            found = self._saved[key] = tuple(self._name_values(names_of_saved(kind), key[1:]))
        return found

    def _name_values(self, names: Sequence[str], found: Sequence[Any]) -> Iterator[SavedValue]:
        for name, value in zip(names, found, strict=True):
            if isinstance(value, str):
                yield SavedValue(name, value=value)
            elif isinstance(value, _Several):
                yield from self._name_values([f"{name}[{place}]" for place in range(len(value))], value)
            else:
                yield SavedValue(name, self._info(value[:3]), version=value[3])


def describe_saved(node: Any) -> tuple[SavedValue, ...]:
    """Describe what the operation of a node saved."""
    return _Describer(None, WeakTensorKeyDictionary()).describe_saved(node)


class _Several(tuple[Any, ...]):
    """What there is to say of several things that are saved under one name."""

    __slots__ = ()


def _read(value: Any) -> str | tuple[Any, ...]:
    """What there is to say of a thing that a node has saved: its text, or the tensor's description and version."""
    if type(value) is SAVED_TENSOR:
        held = holds(value)
        if not isinstance(held, Tensor):
            return ""
        try:
            version = held._version
        except RuntimeError:  # an inference tensor has none
            version = None
        return None if held.is_nested else held.shape, held.dtype, held.device, version
    if isinstance(value, list | tuple) and any(map(is_saved_tensor, value)):
        return _Several(map(_read, value))
    return _shorten(repr(value))


def _key_of(described: Any) -> tuple[Any, ...]:
    return shape_of(described), described.dtype, described.device


def shape_of(described: Any) -> tuple[int, ...] | None:
    """The shape of a tensor, or of torch's description of one; None where it is nested and has no such thing."""
    nested = described.is_nested if isinstance(described, Tensor) else described.is_nested_tensor
    return None if nested else tuple(described.shape)


def describe_tensor(shape: Sequence[int] | None, dtype: torch.dtype, device: torch.device) -> TensorInfo:
    """Describe a tensor as plain data."""
    kind = str(dtype).removeprefix("torch.")
    if shape is None:
        return TensorInfo((), f"nested_{kind}", str(device))
    return TensorInfo(tuple(map(int, shape)), kind, str(device))


def describe(tensor: Any) -> TensorInfo | None:
    """Describe a tensor, or what autograd knows of one, as plain data; None for None."""
    return None if tensor is None else describe_tensor(shape_of(tensor), tensor.dtype, tensor.device)


def examine(gradient: Tensor | None) -> tuple[TensorInfo, int | None] | None:
    """Describe a gradient, and count its elements that are not finite; None for None."""
    info = describe(gradient)
    return None if gradient is None or info is None else (info, count_nonfinite(gradient))


def name_leaves(
    model: nn.Module | Mapping[str, nn.Module] | None, names: Mapping[str, Tensor] | None = None
) -> WeakTensorKeyDictionary:
    """The names of tensors that were given some, and of each parameter of a model, or of several; none of them is held.

    Raises:
        GraphError: what was given a name is not a tensor.
    """
    given = {} if names is None else dict(names)
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise GraphError(f"{name!r} names a {type(tensor).__name__}.", repair="give tensors by name: {'a': a}.")
    models = {"": model} if isinstance(model, nn.Module) else model or {}
    found = WeakTensorKeyDictionary()
    for name, leaf in (*given.items(), *walk_leaves(models.items())):
        found.setdefault(leaf, name)  # a tied parameter has its first name, as in a recording
    return found


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def as_graph(given: Any) -> Iterable[Node]:
    """A graph as it is; of a tensor, or several, the graph that :func:`walk` finds.

    Raises:
        NoGraphError: a tensor has none; for a model.
    """
    several = given if isinstance(given, (list, tuple)) else (given,)
    is_of_tensors = bool(several) and all(isinstance(each, Tensor) for each in several)
    graph: Iterable[Node] = walk(given) if is_of_tensors or isinstance(given, nn.Module) else given
    return graph
