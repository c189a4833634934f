"""All that is known of a node or a fold, in words."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.graph.node import Node, Saved, TensorInfo
from retrograd.views.counts import count_of
from retrograd.views.picture.folds import Fold, Outline
from retrograd.views.picture.sizes import print_amount, print_bytes

Details = list[tuple[str, list[str]]]
"""Terms, and what there is to say of each."""

_MOST_LINES = 12


def describe_graph(outline: Outline) -> str:
    """How large a graph is."""
    top = outline.top
    leaves = count_of(len(top.leaves), "leaf", "leaves")
    return (
        f"{count_of(top.count, 'node')}, {leaves} with {print_amount(top.parameters)} elements, "
        f"{print_bytes(top.saved)} saved for the backward"
    )


def describe_node(outline: Outline, node: Node) -> Details:
    """Everything that a node knows, but for what is empty."""
    where = str(node.line) if node.line is not None else ""
    operation = node.line.operation if node.line is not None else ""
    call = f", call {node.call}" if node.call > 1 else ""
    details = [
        ("module", [f"{node.module}{call}"] if node.module is not None else []),
        ("operation in the forward", [operation] if operation else []),
        ("line", [where] if where else []),
        ("comes in", [_print(info) for info in node.incoming]),
        ("goes out", list(_list_outgoing(outline, node))),
        ("saved", [_print_saved(saved) for saved in node.saved]),
        ("sequence number", [str(node.number)]),
        ("place in the backward", [f"{outline.places[node.index] + 1:,} of {len(outline.places):,}"]),
        ("index in the graph", [str(node.index)]),
    ]
    return [(term, values) for term, values in details if values]


def describe_fold(outline: Outline, fold: Fold, *, can_open: bool) -> Details:
    """What there is in a fold.

    Args:
        outline: the graph.
        fold: which.
        can_open: whether its inside is part of the page.
    """
    kinds = sorted(fold.kinds.items(), key=lambda item: (-item[1], item[0]))
    leaves = [_print_leaf(outline.nodes[index]) for index in list(fold.leaves)[: _MOST_LINES + 1]]
    call = f", call {fold.call}" if fold.call > 1 else ""
    details = [
        ("module", [f"{fold.path}{call}"] if fold.path else []),
        ("nodes", [f"{fold.count:,}" + ("" if can_open else "; too many to be part of this page")]),
        ("kinds", _cut([f"{count:,} × {name}" for name, count in kinds], len(kinds))),
        ("leaves", _cut(leaves, len(fold.leaves))),
        ("elements of the leaves", [f"{fold.parameters:,}"] if fold.leaves else []),
        ("saved for the backward", [print_bytes(fold.saved)] if fold.saved else []),
    ]
    return [(term, values) for term, values in details if values]


def _list_outgoing(outline: Outline, node: Node) -> Iterator[str]:
    for i, edge in enumerate(node.edges):
        info = node.outgoing[i] if i < len(node.outgoing) else None
        if edge is None:
            yield "nothing"
            continue
        other = outline.nodes[edge.node]
        slot = f", slot {edge.slot}" if len(other.incoming) > 1 else ""
        name = other.parameter or "an unnamed leaf" if other.is_leaf else f"{other.place} (n{other.index}{slot})"
        yield f"{_print(info)} → {name}"


def _print(info: TensorInfo | None) -> str:
    return "not known" if info is None else str(info)


def _print_saved(saved: Saved) -> str:
    if saved.tensor is None:
        return f"{saved.name} = {saved.value}" if saved.value else saved.name
    version = f", version {saved.version}" if saved.version else ""
    return f"{saved.name} {saved.tensor}{version}"


def _print_leaf(leaf: Node) -> str:
    shape = f" {leaf.incoming[0]}" if leaf.incoming and leaf.incoming[0] is not None else ""
    return f"{leaf.parameter or 'unnamed leaf'}{shape}"


def _cut(lines: list[str], count: int) -> list[str]:
    return lines if count <= _MOST_LINES else [*lines[:_MOST_LINES], f"and {count - _MOST_LINES:,} more"]
