"""The node of a graph that made the first number that is not finite, found from what its nodes have saved.

A node's result is known where it has saved it, where it can be computed again from what it has saved, and where a node
that takes it has saved it. Where none of that is so, a node is taken to hand on what it was given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from retrograd.core.hooks.finite import is_fine, name_bad, read_saved
from retrograd.core.hooks.nodes import LEAF_NUMBER, edges_of, inputs_of, number_of, root_edges, variable_of
from retrograd.core.hooks.reach import find_nodes, guard_nodes
from retrograd.explaining.facts.nonfinite_reasons import MEAN, Case, find_reason, operation_of

MOST_NODES = 100_000
"""Graphs that are larger are not looked at."""

_COMPUTED = frozenset(
    {"log", "log2", "log10", "log1p", "acos", "asin", "atanh", "acosh", "erfinv", "pow", "mul", "div", "mm", "bmm",
     "cosh", "sinh", "expm1", "tan", "atan2", "mse_loss"}
)  # fmt: skip
"""Operations that are carried out again on what their nodes have saved."""

_CARRIERS = frozenset(
    {"relu", "leaky_relu", "gelu", "silu", "elu", "tanh", "sigmoid", "hardtanh", "clamp", "view", "unsafe_view", "t",
     "transpose", "permute", "squeeze", "unsqueeze", "expand", "select", "slice", "clone", "to_copy", "neg", "index",
     "sum", "mean", "gather", "native_dropout", "reshape_alias", "abs", "max", "amax", "alias", "unbind", "split",
     "cat", "stack"}
)  # fmt: skip
"""Operations that make nothing that is not finite of what is."""

_MASKING = frozenset({"masked_fill", "where", "add", "fill", "copy_slices", "clone", "index_put", "maximum", "cat"})
"""Operations by which a program writes −inf on purpose."""

_EDGES: Mapping[str, Mapping[str, int]] = {"addmm": {"mat1": 1, "mat2": 2}, "baddbmm": {"batch1": 1, "batch2": 2}}
_USUAL_EDGES = {"self": 0, "input": 0, "x1": 0, "x2": 1, "other": 1, "mat2": 1, "exponent": 1, "weight": 1, "target": 1}


@dataclass(frozen=True, slots=True)
class BornInGraph:
    """A node that made numbers that are not finite.

    Attributes:
        born: ``forward``; ``input`` or ``update`` where it was given them by no node.
        operation: what it belongs to.
        kind: its class.
        number: its sequence number.
        reason: why; empty where that was not seen.
        operands: what is known of what it took.
        leaf: the parameter that was not finite before.
        made: what that is: ``NaN``, ``inf`` or ``−inf``; empty where that is not known.
        is_made: all that it took is known and finite, or its reason is; else it may only have handed on a constant.
        kinds: classes of the nodes that it goes back to, and its own, by their numbers.
    """

    born: str
    operation: str
    kind: str
    number: int
    reason: str = ""
    operands: Mapping[str, Tensor] = field(default_factory=dict)
    leaf: Tensor | None = None
    made: str = ""
    is_made: bool = True
    kinds: Mapping[int, str] = field(default_factory=dict)


class _SeenNode:
    """A node, what it took and what it made, as far as that is known."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.number = number_of(node)
        self.kind = type(node).__name__
        self.name = operation_of(self.kind)
        self.saved = {name: _unsigned(value) for name, value in read_saved(node).items()}
        self.dtype = inputs_of(node)[0].dtype
        self.parents = edges_of(node)
        self.results = [each for name, each in self._tensors() if name.startswith(("result", "output"))]
        taken = [(name, each) for name, each in self._tensors() if not name.startswith(("result", "output", "total"))]
        self.operands = dict(sorted(taken, key=lambda each: (self.edge_of(each[0]) or 0, each[0] == "target")))
        self.made = self._compute()
        self.is_bad = False

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, each) for name, each in self.saved.items() if isinstance(each, Tensor))

    def edge_of(self, slot: str) -> int | None:
        return _EDGES.get(self.name, _USUAL_EDGES).get(slot)

    def parent_of(self, slot: str) -> Any:
        edge = self.edge_of(slot)
        return self.parents[edge][0] if edge is not None and edge < len(self.parents) else None

    def _compute(self) -> Tensor | None:
        """Its result, carried out again where it has not saved it."""
        if self.results:
            return self.results[0]
        values = [self.saved[name] for name in ("self", "other", "exponent", "mat2", "target") if name in self.saved]
        if self.name in _COMPUTED and values and any(isinstance(each, Tensor) for each in values):
            needed = 1 if self.name not in ("pow", "mul", "div", "mm", "bmm", "atan2", "mse_loss") else 2
            function = torch.nn.functional.mse_loss if self.name == "mse_loss" else getattr(torch, self.name)
            return function(*values) if len(values) == needed else None
        if self.name == "addmm":
            return self.saved["mat1"] @ self.saved["mat2"] if {"mat1", "mat2"} <= self.operands.keys() else None
        return None

    @property
    def is_empty(self) -> bool:
        """True if it is a mean, or a spread, over too few elements, or divides by zero."""
        total, other = self.saved.get("total_weight"), self.saved.get("other")
        if isinstance(total, Tensor) and total.numel() == 1 and self.saved.get("reduction") == MEAN:
            return bool((total == 0).any())
        if self.name == "div" and isinstance(other, Tensor):
            return bool((other == 0).any())
        if self.name in ("var", "var_mean"):
            return bool(find_reason(self.case()))
        return self.name == "mean" and self.saved.get("self_sym_numel") == 0

    def case(self) -> Case:
        named = {name: value for name, value in self.saved.items() if value is not None}
        numbers = [each for each in (self.saved.get("exponent"),) if isinstance(each, int | float)]
        return Case(self.name, list(self.operands.values()), self.made, numbers, named)


class _Tracer:
    """Finds what a root that is not finite goes back to."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        inner = [node for node in nodes if number_of(node) < LEAF_NUMBER]
        self._seen = {node: _SeenNode(node) for node in sorted(inner, key=number_of)}
        self._find_taken()

    def trace(self, roots: Mapping[Any, Tensor]) -> BornInGraph | None:
        for root, value in roots.items():
            if root in self._seen:
                self._seen[root].made = value
        for seen in self._seen.values():
            seen.is_bad = self._is_bad(seen)
        for seen in reversed(self._seen.values()):
            self._pass_down(seen)
        births = list(self._find_births(roots))
        return self._describe(min(births, key=lambda seen: seen.number)) if births else None

    def _find_taken(self) -> None:
        """Results that nodes which take them have saved."""
        for seen in self._seen.values():
            for slot, tensor in seen.operands.items():
                parent = self._seen.get(seen.parent_of(slot))
                if parent is not None and parent.made is None:
                    parent.made = tensor

    def _is_bad(self, seen: _SeenNode) -> bool:
        if seen.is_empty:
            return True
        if seen.made is None:
            is_given = bool(self._given_bad(seen)) or self._adds_up_masked(seen)
            return is_given or self._find_broken(seen) is not None
        is_mask = seen.name in _MASKING or (seen.name == "log_softmax" and not bool((seen.made == torch.inf).any()))
        is_meant = is_mask and not bool(seen.made.isnan().any()) and not self._given_bad(seen)
        return not is_meant and not is_fine(seen.made)

    def _adds_up_masked(self, seen: _SeenNode) -> bool:
        """Return whether it adds up numbers of which a mask has made some −inf."""
        before = [self._seen[node].made for node, _ in seen.parents if node in self._seen]
        return seen.name in ("sum", "mean") and any(
            made is not None and bool((made == -torch.inf).any()) for made in before
        )

    def _given_bad(self, seen: _SeenNode) -> list[_SeenNode]:
        """The nodes that gave it what is not finite."""
        return [self._seen[node] for node, _ in seen.parents if node in self._seen and self._seen[node].is_bad]

    def _pass_down(self, seen: _SeenNode) -> None:
        """Blame the node before one that only hands on."""
        parents = [self._seen[node] for node, _ in seen.parents if node in self._seen]
        if seen.is_bad and seen.name in _CARRIERS and len(parents) == 1 and parents[0].made is None:
            parents[0].is_bad = True

    def _find_births(self, roots: Iterable[Any]) -> Iterator[_SeenNode]:
        """Bad nodes that a root goes back to through bad ones, and that were given nothing bad."""
        waiting, known = [self._seen[root] for root in roots if root in self._seen], set()
        while waiting:
            seen = waiting.pop()
            if seen.node in known:
                continue
            known.add(seen.node)
            given = self._given_bad(seen)
            waiting += given
            if not given:
                yield seen

    def _find_broken(self, seen: _SeenNode) -> tuple[str, Tensor] | None:
        """Find a tensor that is not finite and that no node made: its slot, and the tensor."""
        for slot, tensor in seen.operands.items():
            parent = seen.parent_of(slot)
            is_broken = tensor.is_floating_point() and bool((tensor.isnan() | (tensor == torch.inf)).any())
            if parent not in self._seen and is_broken:
                return slot, tensor
        for node, _ in seen.parents:
            leaf = variable_of(node) if node is not None and node not in self._seen else None
            if leaf is not None and not is_fine(leaf):
                return "parameter", leaf
        return None

    def _describe(self, seen: _SeenNode) -> BornInGraph:
        broken = self._find_broken(seen)
        if broken is not None:
            leaf = self._leaf_of(seen, *broken)
            born = "input" if leaf is None else "update"
            name = seen.name if leaf is None else ""
            return BornInGraph(
                born,
                name,
                seen.kind,
                seen.number,
                "",
                dict([broken]),
                leaf,
                name_bad(broken[1]),
                True,
                self._kinds_to(seen),
            )
        is_known = all(each is not None and is_fine(each) for each in self._list_taken(seen))
        reason = find_reason(self._case_of(seen, is_whole=is_known)) or self._find_hidden_row(seen)
        is_made = is_known or bool(reason)
        reason = reason or _reason_of_result(seen, is_known=is_known)
        return BornInGraph(
            "forward", seen.name, seen.kind, seen.number, reason, seen.operands, None, name_bad(seen.made), is_made,
            self._kinds_to(seen),
        )  # fmt: skip

    def _kinds_to(self, seen: _SeenNode) -> Mapping[int, str]:
        return {each.number: each.kind for each in self._seen.values() if each.number <= seen.number}

    def _case_of(self, seen: _SeenNode, *, is_whole: bool) -> Case:
        """A node's case: what it has saved, or what the nodes before it made, in the order of its arguments."""
        known = [each for each in self._list_taken(seen) if each is not None]
        operands = known if is_whole or not seen.operands else list(seen.operands.values())
        return replace(seen.case(), operands=operands, is_whole=is_whole)

    def _list_taken(self, seen: _SeenNode) -> list[Tensor | None]:
        """What it took, by its edges; None where that is not known."""
        saved = {seen.edge_of(slot): each for slot, each in seen.operands.items()}
        taken = [saved.get(edge, self._value_at(node)) for edge, (node, _) in enumerate(seen.parents)]
        return [*taken, *(each for slot, each in seen.operands.items() if seen.edge_of(slot) not in range(len(taken)))]

    def _value_at(self, node: Any) -> Tensor | None:
        """What a node gave; None where that is not known."""
        seen = self._seen.get(node)
        return seen.made if seen is not None else None if node is None else variable_of(node)

    def _find_hidden_row(self, seen: _SeenNode) -> str:
        """Return whether a mask right in front of a softmax hides a whole row."""
        if seen.name not in ("softmax", "log_softmax"):
            return ""
        dim, before = int(seen.saved.get("dim", -1)), [self._seen.get(node) for node, _ in seen.parents]
        masks = [each.saved.get("mask") for each in before if each is not None and each.name == "masked_fill"]
        is_hidden = any(isinstance(mask, Tensor) and mask.ndim and bool(mask.all(dim).any()) for mask in masks)
        return f"{seen.name} over a row that is all −inf" if is_hidden else ""

    def _leaf_of(self, seen: _SeenNode, slot: str, tensor: Tensor) -> Tensor | None:
        parent = seen.parent_of(slot)
        if slot == "parameter":
            return tensor
        return variable_of(parent) if parent is not None else None


def find_birth(roots: Sequence[Tensor]) -> BornInGraph | None:
    """Find the node that has made these tensors, which are not finite, so; None where it cannot be told."""
    edges = root_edges([root for root in roots if root.grad_fn is not None])
    reach = find_nodes(edges, MOST_NODES)
    guard_nodes(reach.nodes)
    if len(reach.nodes) > MOST_NODES:
        return None
    with torch.no_grad():
        return _Tracer(reach.nodes).trace({root.grad_fn: root.detach() for root in roots})


def _reason_of_result(seen: _SeenNode, *, is_known: bool) -> str:
    """From the result alone, where what was taken is not known: what holds of every argument that gives it."""
    made, dtype = seen.made, seen.dtype
    has_nan, has_inf = (made is not None and bool(found(made).any()) for found in (torch.isnan, torch.isinf))
    if seen.name == "div" and seen.is_empty:
        return "0 / 0, or NaN / 0" if has_nan and not has_inf else "division by 0"
    if seen.name in ("sqrt", "rsqrt") and has_nan:
        return f"{seen.name} of a negative number" + ("" if is_known else ", or of NaN")
    if seen.name == "rsqrt" and has_inf:
        return "rsqrt of 0"
    if seen.name in ("softmax", "log_softmax") and has_nan:
        return f"{seen.name} over a row that is all −inf, or holds inf or NaN"
    if seen.name in ("exp", "expm1") and has_inf:
        return f"{seen.name} of a number above {math.log(torch.finfo(dtype).max):.1f}"
    return f"in float16, whose largest is {torch.finfo(dtype).max:g}" if dtype is torch.float16 else ""


def _unsigned(value: Any) -> Any:
    """A dimension as it was given: torch shows −1 as 2⁶⁴ − 1."""
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value
