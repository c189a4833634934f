"""Operations that are called at points without a derivative, seen while a forward runs or in its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from retrograd.core.hooks.dispatch import OperationTap, is_operation, why_opaque
from retrograd.core.hooks.engine import next_sequence_number
from retrograd.core.hooks.nodes import name_of, number_of, peek, saved_of
from retrograd.explaining.kinks.point import Point, key_of
from retrograd.explaining.kinks.table import POINTS_OF


@dataclass(frozen=True, slots=True, eq=False)
class Sighting:
    """An operation that has points of this kind, and which of its elements lie there: none, as a rule.

    Attributes:
        point: the kind.
        number: sequence number of the node that it makes.
        lie_there: for each element whether it does.
    """

    point: Point
    number: int
    lie_there: Tensor


class Look:
    """Observes, while it is entered, the operations of this thread that make a node and have such points.

    What operations take is looked at before they run, so that those in place are seen too; nothing that runs is
    changed, and no device is waited for.

    Args:
        see: notified of each, and of each kind of point that its operation has.
    """

    def __init__(self, see: Callable[[Sighting], None]) -> None:
        self._see = see
        self._tap = OperationTap(self._carry_out)
        self._made = 0
        self._unclaimed: list[int] = []
        self._known: dict[int, tuple[Any, tuple[Point, ...], Mapping[str, Any]]] = {}

    def put_on(self) -> None:
        """Start watching, in this thread."""
        self._made = next_sequence_number()
        self._tap.put_on()

    def take_off(self) -> None:
        """Stop watching."""
        self._tap.take_off()
        self._tap.end()

    def __enter__(self) -> Self:
        self.put_on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.take_off()

    def _carry_out(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._claim_number()
        if number is not None:
            known = self._known.get(id(function))
            if known is None:  # torch hashes operations in Python
                known = self._known[id(function)] = (function, *_describe(function))
            if known[1]:
                given = _bind(function, known[2], args, kwargs)
                for point, found in find_points(known[1], given):
                    self._see(Sighting(point, number, found))
        return function(*args, **kwargs)

    def _claim_number(self) -> int | None:
        """The number of the node that autograd has made before it called the operation; None where it made none.

        In between it may have called another: to copy what the operation overwrites. So the newest is its node that
        no other operation has claimed. One that makes none may claim what Python Functions leave; that is of another
        kind, and asked for by no one.
        """
        made = next_sequence_number()
        self._unclaimed.extend(range(self._made, made))
        self._made = made
        return self._unclaimed.pop() if self._unclaimed else None


def find_points(points: Sequence[Point], given: Mapping[str, Any]) -> Iterator[tuple[Point, Tensor]]:
    """Find the elements at each kind of point; kinds of which too little is known are left out.

    Args:
        points: kinds of points of one operation.
        given: what it is called with, by name.
    """
    if any(isinstance(each, Tensor) and (why_opaque(each) or each.is_meta) for each in given.values()):
        return
    for point in points:
        found = _find(point, given)
        if found is not None and found.numel():
            yield point, found


def _find(point: Point, given: Mapping[str, Any]) -> Tensor | None:
    if point.find is None or not isinstance(given.get(point.of), Tensor):
        return None
    with torch.no_grad():
        try:
            found = point.find(given)
        except Exception:  # not known, or of a kind without such points; and the operation is the program's, and runs
            return None
    return found if isinstance(found, Tensor) else None


def _describe(function: Any) -> tuple[tuple[Point, ...], Mapping[str, Any]]:
    """The points that an operation has, and the defaults of its arguments."""
    if not is_operation(function):
        return (), {}
    schema = function._schema
    points = POINTS_OF.get(key_of(schema.name.rpartition("::")[2]), ())
    return points, {each.name: each.default_value for each in schema.arguments if each.has_default_value()}


def _bind(
    function: Any, defaults: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    names = (each.name for each in function._schema.arguments)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


# ---- nodes of a finished graph ----

_BACK: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sqrt": lambda result: result.square().nan_to_num(nan=-1.0),
    "rsqrt": lambda result: result.square().reciprocal().nan_to_num(nan=-1.0),
    "reciprocal": lambda result: result.reciprocal(),
}
"""Operations that save their result instead → what they must have been given, as far as points are concerned."""


def look_at_node(node: Any) -> Iterator[Sighting] | None:
    """Find points of a node's operation; None where it has some and has not saved what would tell."""
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
