"""retrograd: see, keep and rewrite what happens inside ``loss.backward()``.

The names in ``__init__.pyi`` are all there is to rely on. One is loaded when it is first asked for: the command line,
and processes that never import torch, need none of them, and wait for nothing that is imported here.

PYTEST_DONT_REWRITE: to pytest, which loads our plugin, this package says that it may be loaded already.
"""

from importlib import import_module

__version__ = "0.1.0"

_homes: dict[str, str] = {}
_other_names: dict[str, tuple[str, str]] = {}
"""Name that is not in ``__all__`` → module, and what it is called there; an empty text for the module itself."""


def _find_homes() -> dict[str, str]:
    """Return each public name and the module that it is from, as the stub file says."""
    if not _homes:
        import re
        from pathlib import Path

        line = re.compile(r"^from (retrograd[\w.]*) import (\w+) as (\w+)(?: +#.*)?$", re.MULTILINE)
        stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
        for home, its_name, name in line.findall(stub):
            if home == "retrograd":
                _other_names[name] = f"{home}.{its_name}", ""
            elif its_name != name:
                _other_names[name] = home, its_name
            else:
                _homes[name] = home
    return _homes


def __getattr__(name: str) -> object:
    homes = _find_homes()
    if name == "__all__":
        return sorted(homes)
    if name not in homes and name not in _other_names:
        from retrograd.core.guesses import guide

        raise guide("retrograd", name, homes, what="module 'retrograd'")
    from retrograd.core.randomness import random_kept

    with random_kept():  # rich draws when it is loaded, and a script may have seeded before
        home, its_name = _other_names.get(name) or (homes[name], name)
        thing: object = import_module(home)
        if its_name and hasattr(thing, its_name):
            thing = getattr(thing, its_name)
        elif its_name:  # a room that is public as a whole: ``rg.rules.ClipNorm``
            thing = import_module(f"{home}.{its_name}")
    globals()[name] = thing
    return thing


def __dir__() -> list[str]:
    return sorted(_find_homes())
