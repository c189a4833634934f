"""The frame of every HTML page: one file that opens from a disk, in which nothing but its own script runs.

A page is a package with ``page.html`` (its body), style sheets in ``css/`` and scripts in ``js/``, of which ``main.js``
draws it. Sheets and scripts that all pages use stand beside this file; what several pages show is a part, a package
with ``part.html``. A content security policy names the hashes of the page's own script and style: nothing else runs,
and nothing is loaded from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from string import Template
from typing import Any

from retrograd.views.page.embedding import escape_json
from retrograd.views.page.modules import join_modules

SHARED = resources.files("retrograd.views.page")
_STYLES = ("css/theme.css", "css/base.css")
_THEME_SWITCH = (
    '<button id="theme" class="icon" type="button" aria-pressed="false" aria-label="Dark theme" title="Light or dark">'
    '<span aria-hidden="true">◐</span></button>'
)


def frame_page(
    package: str,
    title: str,
    facts: dict[str, Any],
    blocks: Mapping[str, str],
    *,
    styles: Sequence[str] = ("css/page.css",),
    libraries: Sequence[str] = (),
    parts: Mapping[str, str] | None = None,
    words: Mapping[str, str] | None = None,
) -> str:
    """A page as text. What is given as text is escaped: it can be neither markup nor script.

    Args:
        package: where the page's own files are.
        title: of the page; ``$title`` in its body.
        facts: JSON values that the scripts read at once.
        blocks: packed data by name, which the scripts unpack when they need it.
        styles: the page's style sheets, after those of all pages.
        libraries: scripts of others, which run first.
        parts: packages of what other pages show too, by the word after the ``$`` that stands for it in the body.
        words: further texts that the body names with a ``$``. It has ``$theme_switch`` and ``$written`` as well.
    """
    own = resources.files(package)
    shared = {name: resources.files(part) for name, part in (parts or {}).items()}
    version = html.escape(_find_version())
    given = {name: html.escape(text) for name, text in {"title": title, **(words or {})}.items()}
    body = Template(_read(own, "page.html")).substitute(
        given,
        **{name: _read(part, "part.html") for name, part in shared.items()},
        theme_switch=_THEME_SWITCH,
        written=f"Written by retrograd {version}. This file loads nothing and sends nothing.",
    )
    sheets = [(SHARED, name) for name in _STYLES]
    sheets += [(part, "css/part.css") for part in shared.values()] + [(own, name) for name in styles]
    style = "\n".join(_read(home, name) for home, name in sheets)
    modules = join_modules("main.js", _read_scripts(SHARED, *shared.values(), own))
    script = "\n".join([*(_read(own, name) for name in libraries), modules])
    return Template(_read(SHARED, "frame.html")).substitute(
        policy=_make_policy(style, script),
        version=version,
        title=given["title"],
        style=style,
        body=body,
        facts=escape_json(facts),
        blocks="\n".join(_write_block(name, text) for name, text in blocks.items()),
        script=script,
    )


def _read_scripts(*homes: Traversable) -> dict[str, str]:
    files = (file for home in homes for file in home.joinpath("js").iterdir())
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def _write_block(name: str, text: str) -> str:
    return f'<script type="text/plain" id="block-{html.escape(name)}">{text}</script>'


def _make_policy(style: str, script: str) -> str:
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _find_version() -> str:
    try:
        return metadata.version("retrograd")
    except metadata.PackageNotFoundError:
        return ""


def _read(home: Traversable, name: str) -> str:
    return home.joinpath(name).read_text(encoding="utf-8")
