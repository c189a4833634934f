"""retrograd: see, keep and rewrite what happens inside ``loss.backward()``.

The names in ``__init__.pyi`` are all there is to rely on. One is loaded when it is first asked for: the command line,
and processes that never import torch, need none of them.
"""

import re
from importlib import import_module
from pathlib import Path

from retrograd.randomness import random_kept as _random_kept

__version__ = "0.1.0"

_LINE = re.compile(r"^from (retrograd[\w.]*) import (\w+) as \2$", re.MULTILINE)
_HOMES = {name: home for home, name in _LINE.findall(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))}

__all__ = sorted(_HOMES)  # noqa: PLE0605  # one list, and a test holds it against a literal one


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'retrograd' has no attribute {name!r}")
    home = _HOMES[name]
    with _random_kept():  # rich draws when it is loaded, and a script may have seeded before
        if home == __name__:  # a room that is public as a whole: ``rg.rules.ClipNorm``
            return import_module(f"{home}.{name}")
        thing = getattr(import_module(home), name)
    globals()[name] = thing
    return thing


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
