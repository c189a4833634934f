"""What other parts of the house give to the core, which imports none of them.

``retrograd/<part>/plugin.py`` lists what a part provides: by the names below, the places where that stands. Nothing is
loaded before it is asked for, and a part that is not there provides nothing.

    sources, watches    sources of facts of every recording, and those that cost too much for that (``FactSource``)
    explain             ``(run) -> Findings``
    explain_for_page    ``(run, names) -> Explained``; the names are of parameters that never got a gradient
    comparison_page     ``(runs, …) -> str``
    inventory_block     ``(inventory or its file) -> (facts, packed)``, for the report
    run_inventory       the class that takes the inventory for ``retrograd run --inventory``
    requests            classes of commands that run a program
    commands            classes of all commands
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

PARTS = ("explaining", "following", "memory", "rewriting", "tools")


def list_provided(name: str) -> Iterator[Any]:
    """Load what parts provide under a name.

    Raises:
        ImportError: a part is there, and what it lists is not.
    """
    for part in PARTS:
        home = f"retrograd.{part}.plugin"
        try:
            plugin = import_module(home)
        except ModuleNotFoundError as error:
            if error.name not in (home, f"retrograd.{part}"):
                raise
            continue
        place = plugin.PROVIDES.get(name)
        if place is not None:
            module, _, thing = place.partition(":")
            yield getattr(import_module(module), thing)


def find_provided(name: str) -> Any:
    """Load what a part provides under a name; None where none does."""
    return next(list_provided(name), None)
