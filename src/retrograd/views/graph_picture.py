"""A graph as one file that opens offline: a picture (SVG), or a page in which its modules open and close (HTML)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from retrograd.errors import GraphError
from retrograd.files import write_text
from retrograd.graph.node import Node
from retrograd.views.picture.details import describe_graph
from retrograd.views.picture.drawing import draw_svg
from retrograd.views.picture.folds import Outline, choose_depth, make_outline
from retrograd.views.picture.page import build_page
from retrograd.views.picture.placing import place
from retrograd.views.picture.scene import list_opened, make_scene

MOST_BOXES = 60
"""How many boxes a picture shows when no depth is asked for, and how many parts of a list are shown at once."""

MOST_PARTS = 12_000
"""How many boxes a page can show in all; what lies deeper is only counted."""


def draw_graph(graph: Iterable[Node], path: str | os.PathLike[str], *, depth: int | None = None) -> Path:
    """Draw a graph, folded by module: the loss at the top, gradients go down.

    Boxes with a blue ground are module calls, white ones are nodes. A line is labelled by the shape of the gradient
    that arrives at its end. Leaves are pills in the boxes that give them their gradients. The same graph gives the same
    file, byte for byte.

    Args:
        graph: from :func:`rg.walk`; with ``rg.record_origins()`` around the forward, or there are no modules to fold.
        path: a file that ends in ``.svg`` for a picture, or in ``.html`` for a page in which modules open and close.
        depth: how many levels of modules are open; as many as show no more than 60 boxes when left out. A module with
            a single node stays closed: its box says what there is to say.

    Returns:
        The path of the file.

    Raises:
        GraphError: the file's name ends otherwise, the depth is less than 1, or the file cannot be written.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in (".svg", ".html"):
        raise GraphError(
            f"A graph cannot be drawn as {target.name!r}.",
            repair="end the name in .svg for a picture or in .html for a page.",
        )
    if depth is not None and depth < 1:
        raise GraphError(f"depth={depth} would show nothing.", repair="give 1 or more, or leave it out.")
    outline = make_outline(graph, most=MOST_BOXES)
    depth = choose_depth(outline.top, MOST_BOXES) if depth is None else depth
    _write(target, _draw_picture(outline, depth) if suffix == ".svg" else build_page(outline, depth, MOST_PARTS))
    return target


def _draw_picture(outline: Outline, depth: int) -> str:
    opened = list_opened(outline.top, depth)
    scene = make_scene(outline, opened)
    return draw_svg(place(scene, outline.top, set(opened)), "Backward graph", describe_graph(outline))


def _write(target: Path, text: str) -> None:
    try:
        write_text(target, text)
    except OSError as error:
        raise GraphError(
            f"The graph cannot be drawn to {str(target)!r}: {error.strerror or error}.",
            repair="give a file in a folder that exists and can be written.",
        ) from error
