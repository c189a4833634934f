"""Outputs that are data and have no gradient."""

from __future__ import annotations

from typing import Any


class Auxiliary:
    """An output of a Function's ``forward`` that carries data and no gradient.

        return values, rg.Auxiliary(indices)

    The caller gets ``indices`` itself. A tensor never requires grad, whatever its dtype, and ``backward`` has no
    argument for it; ``jvp`` returns no tangent for it.

    Args:
        value: anything.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Auxiliary({self.value!r})"
