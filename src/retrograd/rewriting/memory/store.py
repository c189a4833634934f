"""Names and what is kept under them: one flat dict, of which nothing is ever changed in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_KEPT_TYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


def take_in(given: Tensor | float, device: torch.device | None = None) -> Tensor:
    """Detach what is to be accumulated, in a type that can be added to for long.

    Float64 and complex128 stay as they are, other complex types become complex64, everything else float32.

    Args:
        given: a tensor, which stays on its device; or a number.
        device: where to put a number.
    """
    tensor = given.detach() if isinstance(given, Tensor) else torch.tensor(given, device=device)
    if tensor.dtype in _KEPT_TYPES:
        return tensor
    return tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)


def is_finite(x: Tensor) -> Tensor:
    """As ``torch.isfinite``, in fewer operations, and none with a number of Python's: that is what a number costs."""
    zero = x - x  # NaN where x is infinite or NaN
    return zero == zero


def make_empty() -> Tensor:
    """The value of an accumulator that nothing has entered: NaN."""
    return torch.tensor(float("nan"))


Kept = Tensor | tuple[Tensor, ...] | float | int
"""What can be kept under a name."""


class Store:
    """Tensors and numbers by name.

    A name is always bound to a new tensor and none is written into, so a snapshot of everything is a copy of a dict.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def get(self, name: str, default: Any = None, *, device: torch.device | None = None) -> Any:
        """The value that was put under a name, or ``default``.

        Args:
            name: as it was given to ``put``.
            default: what to return when there is nothing.
            device: where a tensor is needed. What comes from a checkpoint lies on the CPU until it is asked for.
        """
        kept = self._kept.get(name, default)
        if isinstance(kept, Tensor) and device is not None and kept.device != device:
            kept = self._kept[name] = kept.to(device)
        return kept

    def put(self, name: str, value: Kept) -> None:
        """Keep a number, a tensor or a tuple of tensors in place of what was under this name.

        A tensor is detached and not copied: clone one that will be written into, such as the ``.grad`` of a parameter.
        Nothing is looked at, so a NaN is kept like any number; the accumulators of
        :class:`~retrograd.rewriting.memory.memory.Memory` leave it out.
        """
        self._kept[name] = tuple(map(_detach, value)) if isinstance(value, tuple) else _detach(value)

    def put_own(self, name: str, value: Tensor) -> None:
        """As :meth:`put`, for a tensor that was computed from kept ones, and that nobody else has."""
        self._kept[name] = _detach_own(value)

    def append(self, name: str, tensor: Tensor, size: int) -> None:
        """Keep a tensor behind those that are under a name, and of all of them the last ``size``."""
        held: Any = self._kept.get(name, ())
        self._kept[name] = (*held, _detach(tensor))[-size:]

    def append_own(self, name: str, tensor: Tensor, size: int) -> None:
        """As :meth:`append`, for a copy that was made of a detached tensor, and that nobody else has."""
        held: Any = self._kept.get(name, ())
        self._kept[name] = (*held, _detach_own(tensor))[-size:]

    def forget(self, name: str) -> None:
        """Drop what was put under a name; that there is nothing is not an error."""
        self._kept.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def snapshot(self) -> Mapping[str, Kept]:
        """Everything as it is now. It shares the tensors, and costs as much as a dict with their names."""
        return dict(self._kept)

    def restore(self, snapshot: Mapping[str, Kept]) -> None:
        """Go back to a snapshot."""
        self._kept = dict(snapshot)

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything, for a checkpoint: numbers, tensors and tuples of tensors by name."""
        return {name: _clone(kept) for name, kept in self._kept.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict()`` gave; what was kept before is dropped."""
        self._kept = {name: _clone(kept) for name, kept in saved.items()}


def _detach(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_inference():  # it could never take part in training: autograd refuses to save such a tensor
        with torch.inference_mode(False):
            return value.clone()
    return value.detach()


def _detach_own(value: Tensor) -> Tensor:
    """The tensor itself where nothing would change: to detach it takes longer than to ask."""
    detached: Tensor = _detach(value) if value.is_inference() or value.requires_grad else value
    return detached


def _clone(kept: Any) -> Any:
    if isinstance(kept, tuple):
        return tuple(map(_clone, kept))
    return kept.detach().clone() if isinstance(kept, Tensor) else kept
