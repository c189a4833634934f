"""Nodes of a graph that lie at such points, from what they have saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from retrograd.hooks.nodes import name_of, number_of, peek, saved_of
from retrograd.kinks.look import Sighting, find_points
from retrograd.kinks.point import key_of
from retrograd.kinks.table import POINTS_OF

_BACK: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sqrt": lambda result: result.square().nan_to_num(nan=-1.0),
    "rsqrt": lambda result: result.square().reciprocal().nan_to_num(nan=-1.0),
    "reciprocal": lambda result: result.reciprocal(),
}
"""Operations that save their result instead → what they must have been given, as far as points are concerned."""


def look_at_node(node: Any) -> Iterator[Sighting] | None:
    """What lies at points of a node's operation; None where it has some and has not saved what would tell."""
    key = key_of(name_of(node))
    points = POINTS_OF.get(key, ())
    if not points:
        return iter(())
    given = _read(node, key)
    found = [Sighting(point, number_of(node), lie_there) for point, lie_there in find_points(points, given)]
    return iter(found) if found else None


def _read(node: Any, key: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, raw in saved_of(node).items():
        value = peek(raw) if type(raw).__name__ == "SavedTensor" else raw
        if value is not None or raw is None:
            given[name] = value
    if key in _BACK and "self" not in given and isinstance(given.get("result"), Tensor):
        given["self"] = _BACK[key](given["result"])
    return given
