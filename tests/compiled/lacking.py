"""A torch that lacks a name."""

from __future__ import annotations

from typing import Any


class Lacking:
    """A module of torch's, or a class in it, without one of its names."""

    def __init__(self, thing: Any, path: str) -> None:
        self.thing, (self.name, _, self.rest) = thing, path.partition(".")

    def __getattr__(self, name: str) -> Any:
        if name != self.name:
            return getattr(self.thing, name)
        if not self.rest:
            raise AttributeError(f"no {name}")
        return Lacking(getattr(self.thing, name), self.rest)
