"""A graph as one file that opens offline: a picture (SVG), or a page in which its modules open and close (HTML)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from retrograd.core.amounts import count_of
from retrograd.core.errors import GraphError
from retrograd.core.views.page.frame import frame_page, pack_json, write_page
from retrograd.following.views.picture.drawing import Shape, draw_svg, list_shapes
from retrograd.following.views.picture.folds import Drawable, Fold, Gradient, Outline, choose_depth, make_outline
from retrograd.following.views.picture.placing import place
from retrograd.following.views.picture.scene import PORT, Port, Scene, Sheet, Thing, list_folds, list_opened, make_scene
from retrograd.following.views.picture.words import Box, describe_fold, describe_graph, describe_node

MOST_BOXES = 60
"""Boxes that a picture shows when no depth is asked for, and parts of a list that are shown at once."""

MOST_PARTS = 12_000
"""Boxes that a page can show in total; deeper ones are only counted."""


def draw_graph(graph: Drawable, path: str | os.PathLike[str] = "graph.html", *, depth: int | None = None) -> Path:
    """Draw a graph, folded by module: the loss at the top, gradients go down.

    Boxes with a blue ground are module calls, white ones are nodes. A line is labelled by the shape of the gradient
    that arrives at its end. Leaves are pills in the boxes that give them their gradients. The same graph gives the same
    file, byte for byte.

    Args:
        graph: from :func:`rg.walk`, or the loss itself; with ``rg.record_origins()`` around the forward, or there are
            no modules to fold.
        path: a file that ends in ``.svg``, a picture, or in ``.html``, a page in which modules open and close.
        depth: how many levels of modules are open; as many as show no more than 60 boxes when left out. A module with
            a single node stays closed: its box says what there is to say.

    Returns:
        The path of the file.

    Raises:
        GraphError: the path does not come second, the file's name ends otherwise, the depth is less than 1, or the
            file cannot be written.
    """
    if isinstance(graph, (str, os.PathLike)) or not isinstance(path, (str, os.PathLike)):
        raise GraphError(
            f"A graph or a loss comes first and a path second, not {type(graph).__name__} and {type(path).__name__}.",
            repair='give them in this order: rg.draw_graph(loss, "graph.html").',
        )
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in (".svg", ".html"):
        raise GraphError(
            f"A graph cannot be drawn as {target.name!r}.",
            repair="end the name in .svg for a picture or in .html for a page.",
        )
    if depth is not None and depth < 1:
        raise GraphError(f"depth={depth} would show nothing.", repair="give 1 or more, or leave it out.")
    build = build_picture if suffix == ".svg" else build_page
    return write_page(target, build(graph, depth=depth), "The graph", GraphError)


def build_picture(graph: Drawable, *, depth: int | None = None) -> str:
    """Build the picture as SVG text."""
    outline = make_outline(graph, most=MOST_BOXES)
    opened = list_opened(outline.top, choose_depth(outline.top, MOST_BOXES) if depth is None else depth)
    scene = make_scene(outline, opened)
    return draw_svg(place(scene, outline.top, set(opened)), "Backward graph", describe_graph(outline))


def build_page(graph: Drawable, *, depth: int | None = None) -> str:
    """Build the page as text, with at most :data:`MOST_PARTS` boxes; folds that lie deeper cannot be opened.

    Names from the graph are escaped: they can be neither markup nor script.
    """
    outline = make_outline(graph, most=MOST_BOXES)
    depth = choose_depth(outline.top, MOST_BOXES) if depth is None else depth
    folds = list(list_folds(outline.top, MOST_PARTS))
    scene = make_scene(outline, folds)
    first = set(list_opened(outline.top, depth))
    opened = [number for number, fold in enumerate(folds) if number and fold in first]
    return frame_page(
        "retrograd.following.views.picture",
        "Backward graph",
        {"opened": opened, "notice": _say_what_is_missing(outline, len(folds))},
        {"scene": pack_json(write_scene(scene))},
        styles=("css/page.css", "css/graph.css"),
        words={"about": describe_graph(outline)},
    )


def _say_what_is_missing(outline: Outline, shown: int) -> str:
    everything = sum(1 for _ in list_folds(outline.top))
    if shown == everything:
        return ""
    return (
        f"This graph is too large for one page: {count_of(everything - shown, 'fold')} of {everything:,}, those that "
        "lie deepest, cannot be opened here. Draw a smaller part, or search for nodes with graph.find()."
    )


Json = dict[str, Any]

Looks = dict[Box, tuple[int, list[Shape]]]
"""Boxes that look alike, as many of a large graph do: their number, and what is drawn of them."""


def write_scene(scene: Scene) -> Json:
    """All sheets of a scene, which refer to each other by their places in the list, and how their boxes look."""
    numbers = {fold: number for number, fold in enumerate(scene.sheets)}
    looks: Looks = {}
    sheets = [_write_sheet(scene, sheet, numbers, looks) for sheet in scene.sheets.values()]
    return {"sheets": sheets, "looks": [shapes for _, shapes in looks.values()]}


def _write_sheet(scene: Scene, sheet: Sheet, numbers: dict[Fold, int], looks: Looks) -> Json:
    above = sheet.fold.above
    return {
        "title": sheet.fold.title,
        "above": None if above is None else numbers[above],
        "things": [_write_thing(scene, thing, numbers, looks) for thing in sheet.things],
        "rows": sheet.rows,
        "rowOf": sheet.row_of,
        "xs": sheet.xs,
        "lines": [
            {
                "from": line.sender,
                "to": line.taker,
                "chain": line.chain,
                "turned": line.turned,
                "gradients": [_write_gradient(gradient) for gradient in line.gradients],
            }
            for line in sheet.lines
        ],
    }


def _write_thing(scene: Scene, thing: Thing, numbers: dict[Fold, int], looks: Looks) -> Json:
    content, box = thing.content, thing.box
    if isinstance(content, Port) or box is None:
        assert isinstance(content, Port)
        return {
            "gradient": _write_gradient(content.gradient),
            "enters": content.enters,
            "name": thing.name,
            "head": 0,
            "width": PORT,
            "height": 0,
        }
    if box not in looks:
        looks[box] = len(looks), list_shapes(box)
    written = {"name": thing.name, "look": looks[box][0], "head": thing.head, "width": box.width, "height": box.height}
    if not isinstance(content, Fold):
        return {**written, "heading": content.name, "details": describe_node(scene.outline, content)}
    number = numbers.get(content)
    if number is not None:
        written["fold"] = number
    if content.only_node is not None:
        written["alone"] = True
    details = describe_fold(scene.outline, content, can_open=number is not None)
    return {**written, "isModule": True, "heading": content.title, "details": details}


def _write_gradient(gradient: Gradient) -> str:
    return f"{gradient[0]}.{gradient[1]}"
