"""The picture as one HTML file in which modules open and close.

It holds what can be seen, laid out in rows; the scripts only place and draw it.
"""

from __future__ import annotations

from retrograd.views.counts import count_of
from retrograd.views.page.embedding import pack_json
from retrograd.views.page.frame import frame_page
from retrograd.views.picture.details import describe_graph
from retrograd.views.picture.folds import Outline
from retrograd.views.picture.payload import list_sheets
from retrograd.views.picture.scene import list_folds, list_opened, make_scene


def build_page(outline: Outline, depth: int, most: int) -> str:
    """The page as text. Whatever comes from the graph is escaped: it can be neither markup nor script.

    Args:
        outline: the graph.
        depth: how many levels of folds are open at first.
        most: how many boxes may be in the page; folds that lie deeper cannot be opened.
    """
    folds = list(list_folds(outline.top, most))
    scene = make_scene(outline, folds)
    first = set(list_opened(outline.top, depth))
    opened = [number for number, fold in enumerate(folds) if number and fold in first]
    return frame_page(
        "retrograd.views.picture",
        "Backward graph",
        {"opened": opened, "notice": _say_what_is_missing(outline, len(folds))},
        {"sheets": pack_json(list_sheets(scene))},
        styles=("css/page.css", "css/graph.css"),
        words={"about": describe_graph(outline)},
    )


def _say_what_is_missing(outline: Outline, shown: int) -> str:
    everything = sum(1 for _ in list_folds(outline.top))
    if shown == everything:
        return ""
    return (
        f"This graph is too large for one page: {count_of(everything - shown, 'fold')} of {everything:,}, those that "
        "lie deepest, cannot be opened here. Draw a smaller part, or look for nodes with graph.find()."
    )
