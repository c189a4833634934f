"""The picture as one HTML file in which modules open and close.

It holds what can be seen, laid out in rows; the scripts only place and draw it. Like the report's page it has a content
security policy that lets nothing run but its own script, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from string import Template

from retrograd.views.picture.details import describe_graph
from retrograd.views.picture.folds import Outline
from retrograd.views.picture.payload import list_sheets
from retrograd.views.picture.scene import list_folds, list_opened, make_scene
from retrograd.views.picture.sizes import count_of
from retrograd.views.report.packing import pack_bytes
from retrograd.views.report.page import escape_json, find_version, wrap_module

_REPORT, _HERE = resources.files("retrograd.views.report"), resources.files("retrograd.views.picture")
_SHARED = ("dom.js", "payload.js")
_SCRIPTS = (
    "theme.js", "scene.js", "place.js", "draw.js", "view.js", "folding.js", "details.js", "search.js", "keyboard.js",
    "main.js",
)  # fmt: skip
"""Those that are imported before those that import them."""


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
    sheets = json.dumps(list_sheets(scene), allow_nan=False, separators=(",", ":"))
    facts = {"opened": opened, "notice": _say_what_is_missing(outline, len(folds))}
    style, script = _join_styles(), _join_scripts()
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    )
    return Template(_HERE.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        policy=policy,
        version=html.escape(find_version()),
        about=html.escape(describe_graph(outline)),
        style=style,
        facts=escape_json(facts),
        sheets=pack_bytes(sheets.encode()),
        script=script,
    )


def _say_what_is_missing(outline: Outline, shown: int) -> str:
    everything = sum(1 for _ in list_folds(outline.top))
    if shown == everything:
        return ""
    return (
        f"This graph is too large for one page: {count_of(everything - shown, 'fold')} of {everything:,}, those that "
        "lie deepest, cannot be opened here. Draw a smaller part, or look for nodes with graph.find()."
    )


def _join_styles() -> str:
    sheets = [_REPORT.joinpath("css/theme.css"), _HERE.joinpath("css/page.css"), _HERE.joinpath("css/graph.css")]
    return "\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)


def _join_scripts() -> str:
    files = [(name, _REPORT) for name in _SHARED] + [(name, _HERE) for name in _SCRIPTS]
    modules = (wrap_module(name, home.joinpath(f"js/{name}").read_text(encoding="utf-8")) for name, home in files)
    return "\n".join(['"use strict";', *modules])


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
