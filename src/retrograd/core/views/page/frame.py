"""The frame of every HTML page: one file that opens from a disk, in which nothing but its own script runs.

A page is a package with ``page.html`` (its body), style sheets in ``css/`` and scripts in ``js/``, of which ``main.js``
draws it. Sheets and scripts of all pages are beside this file. What several pages show is a part: a package with
``part.html``, all of its ``css/``, of ``js/`` what is imported, and in ``vendor/`` the libraries that run first. A
script of the page takes the place of one of that name in a part.

A content security policy names the hashes of the page's own script and style: nothing else runs, and nothing is loaded.
Data are embedded as JSON that cannot end a script, or packed as gzip in base64, which ``js/payload.js`` reads.

Floats are packed as float32 whose bytes are sorted by significance (all first bytes, all second bytes …), because signs
and exponents of neighbours are alike and compress well. They may be rounded to fewer bits of mantissa first; range, NaN
and infinities stay those of float32.

Scripts are ECMAScript modules with plain imports, so editors and linters understand them. A page that is opened from a
disk may not load modules, so they are put one after the other, each in a function of its own.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrograd.core.addresses import read_path
from retrograd.core.errors import RetrogradError
from retrograd.core.files import to_utf8, write_file, write_whole

SHARED = resources.files("retrograd.core.views.page")
_STYLES = ("css/theme.css", "css/base.css")
_FILE = "This file loads nothing and sends nothing."
_SERVED = "This page loads data from the retrograd server on this machine, and from nowhere else."
_THEME_SWITCH = (
    '<button id="theme" class="icon" type="button" aria-pressed="false" aria-label="Dark theme" title="Light or dark">'
    '<span aria-hidden="true">◐</span></button>'
)


class Again(NamedTuple):
    """How a page that is served learns that its runs have gone on.

    Attributes:
        base: the address at which it asks for their state.
        state: that of the runs when the page was made.
        pause: seconds between two questions.
    """

    base: str
    state: str
    pause: float


def frame_page(
    package: str,
    title: str,
    facts: dict[str, Any],
    blocks: Mapping[str, str],
    *,
    styles: Sequence[str] = ("css/page.css",),
    parts: Mapping[str, str] | None = None,
    words: Mapping[str, str] | None = None,
    is_served: bool = False,
) -> str:
    """Build a page as text. Texts are escaped: they can be neither markup nor script.

    Args:
        package: package with the page's own files.
        title: title of the page; ``$title`` in its body.
        facts: JSON values that the scripts read at once.
        blocks: packed data by name, which the scripts unpack when they need it.
        styles: the page's style sheets, after those of all pages.
        parts: packages that several pages show, by the name of the ``$`` placeholder in the body.
        is_served: the page comes from a server of ours, which it may ask for more.
        words: further texts for ``$`` placeholders in the body, beside ``$theme_switch`` and ``$written``.
    """
    own = resources.files(package)
    shared = {name: resources.files(part) for name, part in (parts or {}).items()}
    version = html.escape(_find_version())
    given = {name: html.escape(text) for name, text in {"title": title, **(words or {})}.items()}
    body = Template(_read(own, "page.html")).substitute(
        given,
        **{name: _read(part, "part.html") for name, part in shared.items()},
        theme_switch=_THEME_SWITCH,
        written=f"Written by retrograd {version}. {_SERVED if is_served else _FILE}",
    )
    sheets = [(SHARED, name) for name in _STYLES]
    sheets += [(part, name) for part in shared.values() for name in _list(part, "vendor", ".css") + _list(part, "css")]
    sheets += [(own, name) for name in styles]
    style = "\n".join(_read(home, name) for home, name in sheets)
    modules = join_modules("main.js", _read_scripts(SHARED, *shared.values(), own))
    libraries = [_read(part, name) for part in shared.values() for name in _list(part, "vendor", ".js")]
    script = "\n".join([*libraries, modules])
    return Template(_read(SHARED, "frame.html")).substitute(
        policy=_make_policy(style, script, is_served=is_served),
        version=version,
        title=given["title"],
        style=style,
        body=_INDENTATION.sub("", body),
        facts=escape_json(facts),
        blocks="\n".join(_write_block(name, text) for name, text in blocks.items()),
        script=script,
    )


def write_page(
    path: str | os.PathLike[str], page: str, what: str, error: type[RetrogradError], *, follow_links: bool = True
) -> Path:
    """Write a page, or a picture, into a file.

    Args:
        path: the file.
        page: its text.
        what: subject of the page, for the message of an error.
        error: raised if the file cannot be written.
        follow_links: write through a link; False replaces it, in a folder that somebody else may have made.

    Returns:
        The path.
    """
    target = read_path(path)
    try:
        with write_file(target) if follow_links else write_whole(target) as file:
            file.write(to_utf8(page))
    except OSError as failed:
        raise error(
            f"{what} cannot be written to {str(target)!r}: {failed.strerror or failed}.",
            repair="give a file in a folder that exists and can be written.",
        ) from failed
    return target


def _list(home: Traversable, folder: str, ending: str = "") -> list[str]:
    """Files of a folder, which need not be there, by name."""
    there = home.joinpath(folder)
    names = sorted(file.name for file in there.iterdir() if file.name.endswith(ending)) if there.is_dir() else []
    return [f"{folder}/{name}" for name in names]


def _read_scripts(*homes: Traversable) -> dict[str, str]:
    files = (file for home in homes for file in home.joinpath("js").iterdir())
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def _write_block(name: str, text: str) -> str:
    return f'<script type="text/plain" id="block-{html.escape(name)}">{text}</script>'


def _make_policy(style: str, script: str, *, is_served: bool) -> str:
    asks = "connect-src 'self'; " if is_served else ""
    return (
        f"{asks}default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
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


_INDENTATION = re.compile(r"^ +", re.MULTILINE)
_IMPORT = re.compile(r'^import \{ ([^}]+) \} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_UNREAD = re.compile(r"^\s*(?:/\*\*.*?\*/|//[^\n]*)?\s*(?:\n|\Z)|^ +", re.MULTILINE | re.DOTALL)
"""Comments on lines of their own, empty lines and indentation: a fifth of what every page would have to hold."""

_EXPORT = re.compile(r"^export ((?:async )?function|const) (\w+)", re.MULTILINE)


def join_modules(entry: str, texts: Mapping[str, str]) -> str:
    """Join a module and everything that it imports, each module after its imports.

    Args:
        entry: file name of the module that runs.
        texts: contents of the files, by name.
    """
    names = dict.fromkeys(_order(entry, texts))
    return "\n".join(['"use strict";', *(wrap_module(name, texts[name]) for name in names)])


def wrap_module(name: str, text: str) -> str:
    """Turn a module into an assignment: its imports come from other such variables, its exports are returned."""
    body = _IMPORT.sub(lambda match: f"const {{ {match[1]} }} = {_variable(match[2])};\n", text)
    body = _EXPORT.sub(r"\1 \2", body)
    body = _UNREAD.sub("", body)
    exports = ", ".join(match[2] for match in _EXPORT.finditer(text))
    return f"const {_variable(name)} = (() => {{\n{body}return {{ {exports} }};\n}})();"


def _order(name: str, texts: Mapping[str, str], above: tuple[str, ...] = ()) -> Iterator[str]:
    if name in above:
        raise ValueError(f"modules of the page import each other in a circle: {' → '.join((*above, name))}")
    for match in _IMPORT.finditer(texts[name]):
        yield from _order(match[2], texts, (*above, name))
    yield name


def _variable(name: str) -> str:
    return f"module_{name.removesuffix('.js')}"


def escape_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    return _print_json(value).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def pack_json(value: Any) -> str:
    """Packed JSON; equal values give equal text."""
    return pack_bytes(_print_json(value).encode())


def pack_bytes(data: bytes) -> str:
    """Packed bytes; equal bytes give equal text."""
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode("ascii")


def _print_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


MANTISSA_BITS = 23
"""Bits of a float32's mantissa: at this number nothing is rounded away."""


def pack_floats(values: npt.NDArray[Any], mantissa_bits: int = MANTISSA_BITS) -> str:
    """Text of an array of any shape, in C order; numbers beyond float32 become infinite or zero."""
    with np.errstate(over="ignore", under="ignore"):
        single = np.ascontiguousarray(values, dtype="<f4").ravel()
    planes = round_mantissa(single, mantissa_bits).view(np.uint8).reshape(-1, 4).T
    return pack_bytes(np.ascontiguousarray(planes).tobytes())


def round_mantissa(values: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    """Round to the nearest float32 whose mantissa ends in ``23 − bits`` zeros."""
    dropped = MANTISSA_BITS - bits
    if dropped <= 0:
        return values
    pattern = values.view(np.uint32)
    rounded = (pattern + np.uint32(1 << (dropped - 1))) & np.uint32((0xFFFFFFFF << dropped) & 0xFFFFFFFF)
    return np.where(np.isfinite(values), rounded, pattern).view(np.float32)


def significant_digits(mantissa_bits: int) -> int:
    """Decimal digits that survive rounding to so many bits."""
    return int((mantissa_bits + 1) * np.log10(2.0))
