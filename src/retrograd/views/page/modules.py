"""ECMAScript modules as one script.

They are written with plain imports, so editors and linters understand them. A page that is opened from a disk may not
load modules, so they are put one after the other, each in a function of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_IMPORT = re.compile(r'^import \{ ([^}]+) \} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const) (\w+)", re.MULTILINE)


def join_modules(entry: str, texts: Mapping[str, str]) -> str:
    """A module and all that it imports, those that are imported before those that import them.

    Args:
        entry: the file name of the module that is run.
        texts: what is in each file, by its name.
    """
    names = dict.fromkeys(_order(entry, texts))
    return "\n".join(['"use strict";', *(wrap_module(name, texts[name]) for name in names)])


def wrap_module(name: str, text: str) -> str:
    """A module as an assignment: its imports taken from other such variables, its exports returned."""
    body = _IMPORT.sub(lambda match: f"const {{ {match[1]} }} = {_variable(match[2])};\n", text)
    body = _EXPORT.sub(r"\1 \2", body)
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
