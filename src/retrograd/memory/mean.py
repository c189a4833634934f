"""The mean of all that came."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.memory.intake import is_finite, make_empty, take_in
from retrograd.memory.store import Store


class Mean:
    """A running mean, of numbers or element by element of tensors of one shape: m ← m + (x − m) / n.

    An element that is NaN or infinite is left out of the mean of its place. Nothing waits for the device.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._value, self._count = f"{name}/mean", f"{name}/mean/count"

    def add(self, x: Tensor | float) -> None:
        """Take in a number or a tensor.

        Raises:
            ValueError: for a tensor of another shape than the first.
        """
        held = self._store.get(self._value)
        x = take_in(x, None if held is None else held.device)
        if held is not None and held.shape != x.shape:
            raise ValueError(f"the mean {self._value!r} is of shape {tuple(held.shape)}, not {tuple(x.shape)}")
        mean = torch.zeros_like(x) if held is None else self._store.get(self._value, device=x.device)
        finite = is_finite(x)
        count = finite.int() if held is None else self._store.get(self._count, device=x.device) + finite
        n = count.clamp(min=1)
        # Divided one by one: the difference of two large numbers may be infinite.
        self._store.put(self._value, torch.where(finite, mean + (x / n - mean / n), mean))
        self._store.put(self._count, count)

    @property
    def value(self) -> Tensor:
        """The mean, float32 or wider, of the shape of what came; NaN where nothing finite has come."""
        mean = self._store.get(self._value)
        return make_empty() if mean is None else torch.where(self.count > 0, mean, torch.nan)

    @property
    def count(self) -> Tensor:
        """How many finite numbers have come, int32: of the shape of what came."""
        count: Tensor | None = self._store.get(self._count)
        return torch.tensor(0, dtype=torch.int32) if count is None else count
