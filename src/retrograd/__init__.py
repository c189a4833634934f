"""retrograd: see, keep and rewrite what happens inside ``loss.backward()``.

The names in ``__init__.pyi`` are all there is to rely on. One is loaded when it is first asked for: the command line,
and processes that never import torch, need none of them, and wait for nothing that is imported here.
"""

from importlib import import_module

__version__ = "0.1.0"

_homes: dict[str, str] = {}


def _find_homes() -> dict[str, str]:
    """Each public name and the module that it is from, as the stub file tells."""
    if not _homes:
        import re
        from pathlib import Path

        line = re.compile(r"^from (retrograd[\w.]*) import (\w+) as \2$", re.MULTILINE)
        stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
        _homes.update((name, home) for home, name in line.findall(stub))
    return _homes


def __getattr__(name: str) -> object:
    homes = _find_homes()
    if name == "__all__":
        return sorted(homes)
    if name not in homes:
        raise AttributeError(f"module 'retrograd' has no attribute {name!r}")
    from retrograd.core.randomness import random_kept

    with random_kept():  # rich draws when it is loaded, and a script may have seeded before
        home = import_module(homes[name])
        if hasattr(home, name):
            thing: object = getattr(home, name)
        else:  # a room that is public as a whole: ``rg.rules.ClipNorm``
            thing = import_module(f"{homes[name]}.{name}")
    globals()[name] = thing
    return thing


def __dir__() -> list[str]:
    return sorted({*globals(), *_find_homes()})
