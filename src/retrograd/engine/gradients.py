"""What a run of our own engine found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from retrograd.engine.fitting import name_tensor
from retrograd.hooks.nodes import name_of

_MOST_LINES = 20


class Gradients(Mapping[Any, Any]):
    """Gradients by what they arrived at: ``gradients[tensor]``, ``gradients[node]``.

    Keys are the leaves that were reached, or what ``to=`` asked for. Of a tensor it has a gradient, or None where none
    arrived; of a node a tuple with what came in to it, or None where it was not reached. Keys are told apart by
    identity.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: list[tuple[Any, Any]]) -> None:
        self._entries = {id(key): (key, value) for key, value in entries}

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._entries[id(key)][1]
        except KeyError:
            raise KeyError(_name(key)) from None

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def by_name(self, model: nn.Module) -> dict[str, Tensor | None]:
        """Gradients of those parameters of the model that are among the keys."""
        return {name: self[parameter] for name, parameter in model.named_parameters() if parameter in self}

    def __repr__(self) -> str:
        lines = [f"  {_name(key)}: {_name_value(value)}" for key, value in list(self.items())[:_MOST_LINES]]
        if len(self) > _MOST_LINES:
            lines.append(f"  and {len(self) - _MOST_LINES} more")
        return "\n".join([f"Gradients of {len(self)}", *lines])


def _name(key: Any) -> str:
    if isinstance(key, Tensor):
        return f"{'leaf' if key.is_leaf else 'tensor'} {name_tensor(key)}"
    return name_of(key) if hasattr(key, "next_functions") else type(key).__name__


def _name_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_name_value, value))})"
    return "nothing" if value is None else name_tensor(value)
