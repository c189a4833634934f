"""A graph in the terminal: modules as a tree, and in them the nodes in the order in which the backward runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TextIO

from rich.console import Console
from rich.text import Text

from retrograd.core.amounts import count_of, show_bytes, show_count
from retrograd.core.cells import show_file
from retrograd.core.errors import GraphError
from retrograd.core.views.terminal import can_print, giving_text, open_console, print_name
from retrograd.following.graph.node import Line, Node
from retrograd.following.views.picture.folds import Drawable, Fold, Outline, make_outline
from retrograd.following.views.picture.words import describe_graph, name_leaf, print_info

MOST_LINES = 60
"""About how many lines are printed when no depth is asked for."""

_GUIDES = ("├── ", "└── ", "│   ", "    ")
_PLAIN_GUIDES = ("|-- ", "`-- ", "|   ", "    ")
_LONGEST_PATTERN = 6
_FEWEST_LEFT_OUT = 3

Run = tuple[list[Node], int]
"""Nodes, and how often nodes of the same kinds follow each other; of those only the first are in the list."""


def print_graph(graph: Drawable, *, depth: int | None = None, file: TextIO | None = None) -> None:
    """Print a graph as a tree by module.

    A module has its number of nodes, the elements of the leaves that get gradients from it, and the bytes that its
    nodes saved. A node has what comes in, the leaves it gives gradients to, the source line of the forward, and the
    tensors it saved; a module with a single node is one line. Runs of equal kinds are printed once:
    ``… 199 × MulBackward0``. Where no modules are known, nodes are numbered in the order in which the backward runs
    them, and each says to which of them its gradients go.

    For a terminal the tree is coloured and wrapped to the window; for a pipe it is plain, and nothing is cut.

    Args:
        graph: from :func:`rg.walk`, or the loss itself; with ``rg.record_origins()`` around the forward, or it is one
            long list.
        depth: how many levels of modules are open; as many as make no more than 60 lines when left out.
        file: where to print; standard output when left out.

    Raises:
        GraphError: the depth is less than 1.
    """
    if depth is not None and depth < 1:
        raise GraphError(f"depth={depth} would show nothing.", repair="give 1 or more, or leave it out.")
    outline = make_outline(graph)
    console = open_console(file)
    console.print(Text(describe_graph(outline), style="bold"))
    guides = _GUIDES if can_print(console, "".join(_GUIDES) + "…×→") else _PLAIN_GUIDES
    writer = _Writer(outline, console, guides)
    for line in writer.list_lines(outline.top, _choose_depth(outline.top) if depth is None else depth, ""):
        console.print(line, soft_wrap=True)


format_graph = giving_text(print_graph)


class _Writer:
    """Lines of a tree."""

    def __init__(self, outline: Outline, console: Console, guides: tuple[str, ...]) -> None:
        self._outline = outline
        self._console = console
        self._tee, self._corner, self._bar, self._gap = guides
        self._is_plain = guides is _PLAIN_GUIDES
        has_modules = any(True for _ in outline.top.folds)
        self._numbers = {} if has_modules else {index: place + 1 for index, place in outline.places.items()}
        """Numbers of nodes, by which lines say where gradients go, where no modules show what belongs together."""

    def list_lines(self, fold: Fold, depth: int, indent: str) -> Iterator[Text]:
        """The inside of a fold."""
        entries = list(list_entries(fold))
        for i, entry in enumerate(entries):
            is_last = i == len(entries) - 1
            begin = indent + (self._corner if is_last else self._tee)
            inside = indent + (self._gap if is_last else self._bar)
            if isinstance(entry, Fold) and entry.only_node is not None:
                title = Text(f"{self._name(entry.title)}  ", style="bold cyan")
                yield from self._wrap(begin, inside, title + self._write_node(entry.only_node))
            elif isinstance(entry, Fold):
                yield from self._wrap(begin, inside, self._write_fold(entry))
                if depth > 1:
                    yield from self.list_lines(entry, depth - 1, inside)
            else:
                nodes, times = entry
                text = self._write_node(nodes[0]) if len(nodes) == times == 1 else self._write_run(nodes, times)
                yield from self._wrap(begin, inside, text)

    def _wrap(self, begin: str, inside: str, text: Text) -> Iterator[Text]:
        """Lines that fit into the window of a terminal, each under the one that it goes on from."""
        room = max(self._console.width - len(inside) - len(self._gap), 20)
        lines = text.wrap(self._console, room) if self._console.is_terminal else [text]
        for i, line in enumerate(lines):
            line.rstrip()
            yield Text(begin if i == 0 else inside + self._gap, style="dim") + line

    def _write_fold(self, fold: Fold) -> Text:
        facts = [count_of(fold.count, "node")]
        if fold.leaves:
            leaves = count_of(len(fold.leaves), "leaf", "leaves")
            facts.append(f"{leaves} with {show_count(fold.parameters)} elements")
        if fold.saved:
            facts.append(f"{show_bytes(fold.saved)} saved")
        return Text(self._name(fold.title), style="bold cyan") + Text(f"  {', '.join(facts)}", style="none")

    def _write_node(self, node: Node) -> Text:
        number = f"{self._numbers[node.index]} " if self._numbers else ""
        text = Text(number, style="dim").append(self._name(node.name), style="none")
        text.append("  " + self._name(", ".join(map(print_info, node.incoming))), style="green")
        targets = ", ".join(self._list_targets(node))
        if targets:
            arrow = "->" if self._is_plain else "→"
            text.append(f"  {arrow} {self._name(targets)}", style="yellow")
        if node.line is not None:
            text.append(f"  {self._name(_print_line(node.line))}", style="dim")
        saved = ", ".join(f"{saved.name} {saved.tensor}" for saved in node.saved if saved.tensor is not None)
        if saved:
            text.append(f"  saved {self._name(saved)}", style="dim")
        return text

    def _list_targets(self, node: Node) -> Iterator[str]:
        """List where its gradients go: leaves by their names, and nodes by their numbers where they have them."""
        inner = [self._numbers[edge.node] for edge in node.edges if edge is not None and edge.node in self._numbers]
        yield from map(str, dict.fromkeys(inner))
        for leaf in self._outline.leaves.get(node.index, ()):
            yield f"{name_leaf(leaf, node.module)} {_print_infos(leaf)}".rstrip()

    def _write_run(self, nodes: list[Node], times: int) -> Text:
        kinds = self._name(", ".join(node.name for node in nodes))
        dots, cross = ("...", "x") if self._is_plain else ("…", "×")
        return Text(f"{dots} {times:,} {cross} {kinds if len(nodes) == 1 else f'({kinds})'}", style="dim")

    def _name(self, name: str) -> str:
        return print_name(self._console, name)


def list_entries(fold: Fold) -> Iterator[Fold | Run]:
    """List what is printed of a fold: folds and nodes, and one line for a pattern of kinds that repeats.

    The first nodes of a pattern are printed as they are.
    """
    parts, i = fold.parts, 0
    while i < len(parts):
        part = parts[i]
        if isinstance(part, Fold):
            yield part
            i += 1
            continue
        length, times = _find_pattern(parts, i)
        for node in parts[i : i + length]:
            assert isinstance(node, Node)
            yield [node], 1
        if times > 1:
            yield [node for node in parts[i + length : i + 2 * length] if isinstance(node, Node)], times - 1
        i += length * times


def _find_pattern(parts: list[Fold | Node], begin: int) -> tuple[int, int]:
    """The pattern of kinds that goes on for longest from here: its length, and how often it comes."""
    best = (1, 1)
    for length in range(1, _LONGEST_PATTERN + 1):
        end = begin + length
        while end < len(parts) and _kind(parts[end]) is not None and _kind(parts[end]) == _kind(parts[end - length]):
            end += 1
        times = (end - begin) // length
        if length * (times - 1) >= max(_FEWEST_LEFT_OUT, length + 1) and length * times > best[0] * best[1]:
            best = (length, times)
    return best


def _kind(part: Fold | Node) -> str | None:
    return None if isinstance(part, Fold) else part.name


def _choose_depth(top: Fold) -> int:
    depth, lines = 1, _count_lines(top, 1)
    while lines < (more := _count_lines(top, depth + 1)) <= MOST_LINES:
        depth, lines = depth + 1, more
    return depth


def _count_lines(fold: Fold, depth: int) -> int:
    count = sum(1 for _ in list_entries(fold))
    opened = (inner for inner in fold.folds if depth > 1 and inner.only_node is None)
    return count + sum(_count_lines(inner, depth - 1) for inner in opened)


def _print_line(line: Line) -> str:
    """A source line, its file as seen from here or, where it is installed, from where packages are."""
    file = PurePath(show_file(line.file))
    if "site-packages" in file.parts:
        file = PurePath(*file.parts[file.parts.index("site-packages") + 1 :])
    elif file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return f"{file}:{line.line} in {line.function}" + (f" ({line.operation})" if line.operation else "")


def _print_infos(leaf: Node) -> str:
    return ", ".join(str(info) for info in leaf.incoming if info is not None)
