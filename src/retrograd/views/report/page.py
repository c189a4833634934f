"""One HTML file from a template, style sheets, scripts and data.

Scripts are ECMAScript modules with plain imports, so editors and linters understand them. Here they are put one
after the other, each in a function of its own, because a page opened from a disk may not load modules.
A content security policy names the hashes of the page's own script and style: nothing else runs, and nothing is
loaded from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable
from importlib import metadata, resources
from string import Template
from typing import Any

from retrograd.views.report.blocks import Block

_HERE = resources.files("retrograd.views.report")
_STYLES = ("vendor/uPlot.min.css", "css/theme.css", "css/page.css", "css/map.css", "css/panels.css")
_LIBRARY = "vendor/uPlot.iife.min.js"
_ENTRY = "main.js"

_IMPORT = re.compile(r'^import \{ ([^}]+) \} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const) (\w+)", re.MULTILINE)


def build_page(title: str, facts: dict[str, Any], blocks: Iterable[Block]) -> str:
    """The page as text. Whatever comes from the run is escaped: it can be neither markup nor script."""
    style, script = join_styles(), join_scripts()
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data: blob:; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    )
    return Template(_read("page.html")).substitute(
        policy=policy,
        version=html.escape(find_version()),
        title=html.escape(title),
        style=style,
        facts=escape_json(facts),
        blocks="\n".join(
            f'<script type="text/plain" id="block-{html.escape(block.name)}">{block.text}</script>' for block in blocks
        ),
        script=script,
    )


def escape_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def join_styles() -> str:
    """All style sheets."""
    return "\n".join(_read(name) for name in _STYLES)


def join_scripts() -> str:
    """The vendored library and all modules, those that are imported before those that import them."""
    order = dict.fromkeys(_order_modules(_ENTRY))
    return "\n".join([_read(_LIBRARY), '"use strict";', *(wrap_module(name, _read(f"js/{name}")) for name in order)])


def wrap_module(name: str, text: str) -> str:
    """A module as an assignment: its imports taken from other such variables, its exports returned."""
    body = _IMPORT.sub(lambda match: f"const {{ {match[1]} }} = {_variable(match[2])};\n", text)
    body = _EXPORT.sub(r"\1 \2", body)
    exports = ", ".join(match[2] for match in _EXPORT.finditer(text))
    return f"const {_variable(name)} = (() => {{\n{body}return {{ {exports} }};\n}})();"


def find_version() -> str:
    """Version of this package as installed."""
    try:
        return metadata.version("retrograd")
    except metadata.PackageNotFoundError:
        return ""


def _order_modules(name: str, above: tuple[str, ...] = ()) -> Iterable[str]:
    if name in above:
        raise ValueError(f"modules of the page import each other in a circle: {' → '.join((*above, name))}")
    for match in _IMPORT.finditer(_read(f"js/{name}")):
        yield from _order_modules(match[2], (*above, name))
    yield name


def _variable(name: str) -> str:
    return f"module_{name.removesuffix('.js')}"


def _read(name: str) -> str:
    return _HERE.joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
