"""Pictures of things, for those who ask the thing itself.

Drawing is done in rooms named ``views``, above all rooms whose things are drawn. A view is loaded when it is first
asked, so that a room neither knows it nor waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from retrograd.core.randomness import random_kept


def ask_view(home: str, name: str) -> Callable[..., Any]:
    """A function of a view.

    Args:
        home: its module, as in ``retrograd.core.views.notebook.plots``.
        name: its name.
    """
    if home not in sys.modules:
        with random_kept():  # rich and matplotlib draw numbers when they are loaded; a script may have seeded before
            import_module(home)
    function: Callable[..., Any] = getattr(import_module(home), name)
    return function


def drawn_by(home: str, name: str) -> Callable[[Any], str]:
    """A ``_repr_html_`` that leaves the drawing to a view.

    Args:
        home: its module.
        name: the name of a function from the thing to HTML.
    """

    def draw(thing: Any) -> str:
        with random_kept():
            return str(ask_view(home, name)(thing))

    draw.__doc__ = "Give the HTML that a notebook shows."
    return draw
