"""A fault of ours never stops the program that is looked at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from retrograd.errors import NoGraphError
from retrograd.hooks.engine import uncompiled
from retrograd.notices import warn

F = TypeVar("F", bound=Callable[..., Any])


def never_raise(consequence: str = "") -> Callable[[F], F]:
    """Decorate methods that torch calls in the middle of the program's work, and that return nothing.

    A root without a graph is nothing to tell of: torch does.

    Args:
        consequence: what follows from an error, as the warning says; where it is empty the object is told of it, by
            ``self.fault(name of the method, error)``.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        @uncompiled
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                method(self, *args, **kwargs)
            except NoGraphError:
                return
            except Exception as error:
                if consequence:
                    warn(f"{consequence}: {error!r}")
                else:
                    self.fault(method.__qualname__, error)

        return call  # type: ignore[return-value]

    return decorate
