"""Where in a backward pass gradients became zero, or ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from retrograd.gradients.reason import Why
from retrograd.graph.node import readable_values
from retrograd.hooks.dispatch import plain_torch
from retrograd.hooks.node_tap import Gradients
from retrograd.hooks.nodes import is_leaf, name_of
from retrograd.hooks.reach import Reach, read_links

_OFF = ("Relu", "Threshold", "Hardtanh", "Clamp", "Hardsigmoid", "Hardswish", "Softshrink", "Hardshrink", "Prelu")
_FLAT = ("Round", "Floor", "Ceil", "Trunc", "Sign", "Sgn", "Heaviside", "Zeros", "FullLike", "Fill")
_SATURATING = ("Sigmoid", "Tanh", "Softmax", "LogSoftmax", "LogSigmoid", "Softplus", "Erf", "Gelu", "Silu", "Mish")
_PICKING = (
    "Index", "Select", "Slice", "Gather", "Embedding", "Narrow", "Split", "Unbind", "Max", "Min", "Amax", "Topk",
    "Sort", "Where", "MaskedFill", "MaskedSelect", "Take",
)  # fmt: skip
_FACTORS = ("Mul", "Div", "Mm", "Addmm", "Bmm", "Baddbmm", "Convolution", "Linear", "Dot", "Mv", "Prod", "Einsum")


@dataclass(frozen=True, slots=True)
class End:
    """A node behind which a gradient is zero, or that gave none.

    Attributes:
        place: of the node among those of the pass.
        kind: of the node.
        edge: which of the gradients that it gives.
        is_none: it gave None.
        is_hook: what it gave was not zero, and is zero where it arrives: a hook in between made it so.
    """

    place: int
    kind: str
    edge: int
    is_none: bool = False
    is_hook: bool = False

    @property
    def why(self) -> Why:
        """In a word."""
        kind = self.kind
        if self.is_hook or kind.startswith("BackwardHookFunction"):
            return "hook"
        if self.is_none:
            return "no derivative"
        for starts, why in _KINDS:
            if kind.startswith(starts):
                return why
        return "zero"


_KINDS: tuple[tuple[tuple[str, ...], Why], ...] = (
    (_FLAT, "step function"),
    (_OFF, "dead units"),
    (_SATURATING, "saturated"),
    (_PICKING, "not picked"),
    (_FACTORS, "zero factor"),
)


class ZeroWatch:
    """Notes of each node of a pass whether what comes in, and what goes out, is zero. It waits for the device.

    Args:
        nodes: those that run; their places are those in ``reach``.
        reach: the graph.
    """

    def __init__(self, nodes: Sequence[Any], reach: Reach) -> None:
        self._kinds = [name_of(node) for node in reach.nodes]
        self._is_leaf = [is_leaf(node) for node in reach.nodes]
        self._edges = list(read_links(reach.links))
        places = {id(node): place for place, node in enumerate(reach.nodes)}
        self._places = [places[id(node)] for node in nodes]
        self._came: dict[int, bool] = {}
        self._gave: dict[int, tuple[bool | None, ...]] = {}

    def before(self, index: int, incoming: Gradients) -> None:
        """A node is about to run."""
        place = self._places[index]
        self._came[place] = self._came.get(place, False) or any(map(_is_some, incoming))

    def after(self, index: int, outgoing: Gradients) -> None:
        """It has run."""
        self._gave[self._places[index]] = tuple(None if each is None else _is_some(each) for each in outgoing)

    def came(self, place: int) -> bool | None:
        """Whether what came in to a node was not zero; None where it did not run."""
        return self._came.get(place)

    def find_ends(self, place: int) -> list[End]:
        """Where the gradient of a leaf became zero, or ended: as near to it as it can be told."""
        found: list[End] = []
        seen = {place}
        waiting = [place]
        for target in waiting:  # grows while it is walked
            for parent, edge, has_come in self._into(target):
                end = self._judge(parent, edge, has_come=has_come)
                if end is not None:
                    found.append(end)
                elif parent not in seen and self._came.get(parent) is not True:
                    seen.add(parent)
                    waiting.append(parent)
        return found

    def _judge(self, parent: int, edge: int, *, has_come: bool) -> End | None:
        gave = self._gave.get(parent)
        if gave is None:
            return None
        kind = self._kinds[parent]
        if gave[edge]:
            return None if has_come else End(parent, kind, edge, is_hook=True)
        return End(parent, kind, edge, is_none=gave[edge] is None) if self._came.get(parent) else None

    def _into(self, target: int) -> list[tuple[int, int, bool]]:
        came = self._came.get(target, False)
        return [(parent, edge, came) for parent, edge in self._parents.get(target, ())]

    @cached_property
    def _parents(self) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = {}
        for parent, edges in enumerate(self._edges):
            for edge, to in enumerate(edges):
                if to is not None:
                    found.setdefault(to[0], []).append((parent, edge))
        return found


def _is_some(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    with plain_torch():
        return has_nonzero(gradient) is not False


def has_nonzero(tensor: Tensor) -> bool | None:
    """Whether an element is not zero; NaN is not. None where that cannot be told."""
    with torch.no_grad():
        values = readable_values(tensor)
        return None if values is None else bool((values != 0).any())
