"""A fault of ours does not stop a training step: it is said once, and the step goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from retrograd.errors import NoGraphError
from retrograd.notices import warn

P = ParamSpec("P")


def harmless(function: Callable[P, None]) -> Callable[P, None]:
    """Decorator for what torch calls. A root without a graph is nothing to warn of: torch will."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except NoGraphError:
            return
        except Exception as error:
            warn(f"the inventory failed, and is not complete: {error!r}")

    return call
