"""``rg.walk``: from roots to leaves, each node once, without recursion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from retrograd.errors import GraphError
from retrograd.graph.graph import Columns, Graph
from retrograd.graph.node import Edge, Line, SavedValue, TensorInfo, count_nonfinite
from retrograd.graph.origins import Origins, latest_origins
from retrograd.hooks.names import walk_leaves, watched_name
from retrograd.hooks.nodes import (
    LEAF_NUMBER,
    inputs_of,
    is_leaf,
    is_saved_tensor,
    name_of,
    number_of,
    peek,
    root_edges,
    saved_of,
    variable_of,
)
from retrograd.hooks.reach import find_nodes, guard_nodes, read_links

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
        saved: whether to look at what each operation saved; a walk takes a third of the time without.
        names: names leaves that are no parameters: ``{"a": a}``. Those that were handed to ``rg.watch("a", a)`` have
            the name ``watch/a``.

    Returns:
        The graph, in which a node comes after the one it was found from.

    Raises:
        NoGraphError: a root has no graph.
    """
    edges = root_edges(roots)
    nodes, _, links = find_nodes(edges)
    describe = _Describer(origins or latest_origins(), name_leaves(model, names), saved=saved)
    for node, targets in zip(nodes, read_links(links), strict=True):
        describe.add(node, targets)
    guard_nodes(nodes, links)
    return Graph(describe.columns, [Edge(nodes.index(node), slot) for node, slot in edges], nodes)


class _Describer:
    """Fills the columns of a graph; what many nodes share is made once."""

    def __init__(self, origins: Origins | None, leaves: WeakTensorKeyDictionary, *, saved: bool) -> None:
        self.columns = Columns()
        self._origins = origins
        self._leaves = leaves
        self._saved = saved
        self._names: dict[type, str] = {}
        self._infos: dict[tuple[Any, ...], TensorInfo] = {}
        self._edges: dict[tuple[int, int], Edge] = {}

    def add(self, node: Any, targets: tuple[tuple[int, int] | None, ...]) -> None:
        columns = self.columns
        number = number_of(node)
        kind = type(node)
        name = self._names.get(kind)
        if name is None:
            name = self._names[kind] = name_of(node)
        if is_leaf(node):
            self._add_leaf(node)
        columns.names.append(name)
        columns.numbers.append(None if number == LEAF_NUMBER else number)
        columns.incoming.append(
            tuple([self._info(shape_of(each), each.dtype, each.device) for each in inputs_of(node)])
        )
        columns.edges.append(tuple([target and self._edge(target) for target in targets]))
        columns.saved.append(self._describe_saved(node) if self._saved else ())
        columns.places.append(self._find_place(number))

    def _add_leaf(self, node: Any) -> None:
        variable = variable_of(node)
        assert variable is not None
        name = self._leaves.get(variable)
        if name is None and self._origins is not None:
            name = self._origins.name_parameter(variable)
        if name is None:
            name = watched_name(variable)
        if name is not None:
            self.columns.parameters[len(self.columns.names)] = name

    def _edge(self, target: tuple[int, int]) -> Edge:
        edge = self._edges.get(target)
        if edge is None:
            edge = self._edges[target] = Edge(*target)
        return edge

    def _info(self, shape: Any, dtype: torch.dtype, device: torch.device) -> TensorInfo:
        key = shape, dtype, device
        info = self._infos.get(key)
        if info is None:
            info = self._infos[key] = describe_tensor(shape, dtype, device)
        return info

    def _find_place(self, number: int) -> Place:
        if self._origins is None or number == LEAF_NUMBER:
            return _NOWHERE
        origin = self._origins.find(number)
        return (origin.module, origin.call, origin.line) if origin is not None else _NOWHERE

    def _describe_saved(self, node: Any) -> tuple[SavedValue, ...]:
        found: list[SavedValue] = []
        for name, value in saved_of(node).items():
            several = value if isinstance(value, list | tuple) and any(map(is_saved_tensor, value)) else None
            if several is None:
                found.append(self._describe_value(name, value))
            else:
                found.extend(self._describe_value(f"{name}[{n}]", each) for n, each in enumerate(several))
        return tuple(found)

    def _describe_value(self, name: str, value: Any) -> SavedValue:
        if not is_saved_tensor(value):
            return SavedValue(name, value=_shorten(repr(value)))
        tensor = peek(value)
        if tensor is None:
            return SavedValue(name)
        return SavedValue(name, self._info(shape_of(tensor), tensor.dtype, tensor.device), version=_version_of(tensor))


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


def _version_of(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
