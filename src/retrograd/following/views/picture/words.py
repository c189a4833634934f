"""Words about nodes and folds: in the boxes of a picture, which are as large as their words, and beside it.

Letters are of one width, so that Python knows the size of a text without a browser. ``js/place.js`` and ``js/draw.js``
have the same measures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from retrograd.core.amounts import count_of, show_bytes, show_count
from retrograd.following.graph.node import Node, SavedValue, TensorInfo, shorten_line
from retrograd.following.graph.plain_names import name_plainly, name_saved_plainly
from retrograd.following.views.picture.folds import Fold, Gradient, Outline

LETTER = 0.602
TITLE, NOTE, PILL, LABEL = 13.0, 11.0, 10.5, 11.0
"""Font sizes."""
TITLE_LINE, NOTE_LINE, PILL_LINE = 17.0, 15.0, 19.0
MARGIN = 12.0
_LONGEST = {TITLE: 36, NOTE: 42, PILL: 42, LABEL: 40}
_MOST_PILLS = 4
_MOST_LABELS = 2


@dataclass(frozen=True, slots=True)
class Box:
    """One box as it is drawn when it is closed.

    Attributes:
        is_fold: whether it stands for a fold, and not for a node.
        title, notes, pills: lines of text inside.
        labels: lines above it: what arrives.
        width, height: of the box, without the labels.
    """

    is_fold: bool
    title: str
    notes: tuple[str, ...]
    pills: tuple[str, ...]
    labels: tuple[str, ...]
    width: float
    height: float


def make_box(outline: Outline, part: Fold | Node, incoming: Iterable[Gradient], usual: str) -> Box:
    """The box of a fold or node.

    Args:
        outline: the graph.
        part: which.
        incoming: the gradients that arrive at it.
        usual: the type of tensors that is not mentioned.
    """
    infos = [_info_at(outline.nodes, gradient) for gradient in incoming]
    labels = _count_equal(infos, usual)
    if isinstance(part, Fold):
        return _measure(True, part.title, _note_fold(part), _pills_of_fold(outline, part, usual), labels)
    pills = _list_pills([outline.nodes[leaf.index] for leaf in outline.leaves.get(part.index, ())], part.module, usual)
    return _measure(False, part.name, _note_node(part), pills, labels)


def name_leaf(leaf: Node, module: str | None) -> str:
    """The name of a leaf, without the path of a module that it is in."""
    name = leaf.parameter or "unnamed leaf"
    return name.removeprefix(f"{module}:").removeprefix(f"{module}.") if module else name


def _note_fold(fold: Fold) -> list[str]:
    if fold.only_node is not None:
        return [fold.only_node.name, *_note_node(fold.only_node)]
    if len(fold.kinds) == 1:
        (kind, count), *_ = fold.kinds.items()
        nodes = f"{count:,} × {kind}"
    else:
        nodes = count_of(fold.count, "node")
    return [nodes, f"{show_bytes(fold.saved)} saved"] if fold.saved else [nodes]


def _note_node(node: Node) -> list[str]:
    plainly, place = name_plainly(node.name), shorten_line(node.line) if node.line is not None else ""
    operation = node.line.operation if node.line is not None else ""
    is_said = plainly.lower() == operation.replace("_", " ").lower()
    return [line for line in ("" if is_said else plainly, " · ".join(filter(None, (operation, place)))) if line]


def _pills_of_fold(outline: Outline, fold: Fold, usual: str) -> list[str]:
    leaves = [outline.nodes[index] for index in fold.leaves]
    if len(leaves) <= 2:
        return _list_pills(leaves, fold.path, usual)
    return [f"{count_of(len(leaves), 'leaf', 'leaves')} · {show_count(fold.parameters)} elements"]


def _list_pills(leaves: list[Node], module: str | None, usual: str) -> list[str]:
    shown = leaves if len(leaves) <= _MOST_PILLS else leaves[: _MOST_PILLS - 1]
    pills = [_print_leaf(leaf, module, usual) for leaf in shown]
    more = len(leaves) - len(shown)
    return [*pills, f"and {more:,} more {'leaf' if more == 1 else 'leaves'}"] if more else pills


def _print_leaf(leaf: Node, module: str | None, usual: str) -> str:
    shape = print_shape(leaf.incoming[0], usual) if leaf.incoming else ""
    name = name_leaf(leaf, module)
    room = max(_LONGEST[PILL] - len(shape) - 1, 12)
    return f"{name if len(name) <= room else '…' + name[1 - room :]} {shape}".rstrip()


def _count_equal(infos: list[TensorInfo | None], usual: str) -> list[str]:
    counts: dict[str, int] = {}
    for info in infos:
        text = print_shape(info, usual)
        counts[text] = counts.get(text, 0) + 1
    counts.pop("", None)
    labels = [text if count == 1 else f"{count:,} × {text}" for text, count in counts.items()]
    if len(labels) > _MOST_LABELS:
        labels[_MOST_LABELS - 1 :] = [f"and {len(labels) - _MOST_LABELS + 1:,} other shapes"]
    return labels


def _info_at(nodes: list[Node], gradient: Gradient) -> TensorInfo | None:
    incoming = nodes[gradient[0]].incoming
    return incoming[gradient[1]] if gradient[1] < len(incoming) else None


def _measure(is_fold: bool, title: str, notes: list[str], pills: list[str], labels: list[str]) -> Box:
    title, *rest = [_shorten(title, TITLE), *(_shorten(note, NOTE) for note in notes)]
    pills, labels = [_shorten(pill, PILL) for pill in pills], [_shorten(label, LABEL) for label in labels]
    width = max(
        len(title) * LETTER * TITLE + 2 * MARGIN + 20,
        *(len(note) * LETTER * NOTE + 2 * MARGIN for note in rest),
        *(len(pill) * LETTER * PILL + 2 * MARGIN + 10 for pill in pills),
        *(len(label) * LETTER * LABEL + 8 for label in labels),
        96,
    )
    height = 14 + TITLE_LINE + NOTE_LINE * len(rest) + (PILL_LINE * len(pills) + 3 if pills else 0)
    return Box(is_fold, title, tuple(rest), tuple(pills), tuple(labels), 2.0 * round(width / 2), height)


def _shorten(text: str, size: float) -> str:
    longest = _LONGEST[size]
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


Details = list[tuple[str, list[str]]]
"""Terms, and what there is to say of each."""

_MOST_LINES = 12


def describe_graph(outline: Outline) -> str:
    """The size of a graph in words."""
    top = outline.top
    leaves = count_of(len(top.leaves), "leaf", "leaves")
    return (
        f"{count_of(top.count, 'node')}, {leaves} with {show_count(top.parameters)} elements, "
        f"{show_bytes(top.saved)} saved for the backward"
    )


def describe_node(outline: Outline, node: Node) -> Details:
    """Everything that a node knows, but for what is empty."""
    where = str(node.line) if node.line is not None else ""
    operation = node.line.operation if node.line is not None else ""
    call = f", call {node.call}" if node.call > 1 else ""
    details = [
        ("gradient of", [name_plainly(node.name)] if name_plainly(node.name) else []),
        ("module", [f"{node.module}{call}"] if node.module is not None else []),
        ("operation in the forward", [operation] if operation else []),
        ("line", [where] if where else []),
        ("incoming", [print_info(info) for info in node.incoming]),
        ("outgoing", list(_list_outgoing(outline, node))),
        ("saved", [_print_saved(node, saved) for saved in node.saved]),
        ("sequence number", [str(node.number)]),
        ("order in the backward", [f"{outline.places[node.index] + 1:,} of {len(outline.places):,}"]),
        ("index in the graph", [str(node.index)]),
    ]
    return [(term, values) for term, values in details if values]


def describe_fold(outline: Outline, fold: Fold, *, can_open: bool) -> Details:
    """Describe what there is in a fold.

    Args:
        outline: the graph.
        fold: which.
        can_open: whether its inside is part of the page.
    """
    kinds = sorted(fold.kinds.items(), key=lambda item: (-item[1], item[0]))
    leaves = [_tell_leaf(outline.nodes[index]) for index in list(fold.leaves)[: _MOST_LINES + 1]]
    call = f", call {fold.call}" if fold.call > 1 else ""
    details = [
        ("module", [f"{fold.path}{call}"] if fold.path else []),
        ("nodes", [f"{fold.count:,}" + ("" if can_open else "; too many to be part of this page")]),
        ("kinds", _cut([f"{count:,} × {name}" for name, count in kinds], len(kinds))),
        ("leaves", _cut(leaves, len(fold.leaves))),
        ("elements of the leaves", [f"{fold.parameters:,}"] if fold.leaves else []),
        ("saved for the backward", [show_bytes(fold.saved)] if fold.saved else []),
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
        yield f"{print_info(info)} → {name}"


def print_info(info: TensorInfo | None) -> str:
    """Type, shape and device."""
    return "not known" if info is None else str(info)


def _print_saved(node: Node, saved: SavedValue) -> str:
    if saved.tensor is None:
        return f"{saved.name} = {saved.value}" if saved.value else saved.name
    version = f", version {saved.version}" if saved.version else ""
    plainly = name_saved_plainly(node.name, saved.name).rpartition(": ")[2]
    return f"{saved.name} {saved.tensor}{version}" + (f", the {plainly}" if plainly != saved.name else "")


def _tell_leaf(leaf: Node) -> str:
    shape = f" {leaf.incoming[0]}" if leaf.incoming and leaf.incoming[0] is not None else ""
    return f"{leaf.parameter or 'unnamed leaf'}{shape}"


def _cut(lines: list[str], count: int) -> list[str]:
    return lines if count <= _MOST_LINES else [*lines[:_MOST_LINES], f"and {count - _MOST_LINES:,} more"]


_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def print_shape(info: TensorInfo | None, usual: str = "") -> str:
    """``[8, 512]``, with the type where it is not the usual one; ``scalar`` for a tensor without dimensions."""
    if info is None:
        return ""
    shape = f"[{', '.join(map(str, info.shape))}]" if info.shape else "scalar"
    return shape if info.dtype == usual else f"{info.dtype} {shape}" if not info.shape else f"{info.dtype}{shape}"


def clean(text: str) -> str:
    """Without characters that XML does not have."""
    return _NOT_XML.sub("\ufffd", text)
