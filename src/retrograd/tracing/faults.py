"""A fault of ours must never stop the program that is looked at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from retrograd.errors import NoGraphError
from retrograd.notices import warn

P = ParamSpec("P")


def harmless(function: Callable[P, None]) -> Callable[P, None]:
    """Decorator: what goes wrong inside becomes a warning. A root without a graph is nothing to warn of: torch will."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except NoGraphError:
            return
        except Exception as error:  # whatever it is, the program goes on
            warn(f"a backward pass was not traced as asked: {error!r}")

    return guarded
