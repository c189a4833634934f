"""Averages of all that came: the mean, and the exponential moving average."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.rewriting.memory.store import Store, is_finite, make_empty, take_in


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
        """The number of finite numbers that have come, int32: of the shape of what came."""
        count: Tensor | None = self._store.get(self._count)
        return torch.tensor(0, dtype=torch.int32) if count is None else count


class Ema:
    """An exponential moving average, of numbers or element by element of tensors of one shape.

        m ← d·m + (1 − d)·x        w ← d·w + (1 − d)        value = m / w        d the decay, m and w from 0

    So the value is a weighted mean from the first number on: m / (1 − dⁿ), as Adam corrects its averages (Kingma &
    Ba 2015, arXiv 1412.6980). With :meth:`start` it begins at a given value instead, and w stays 1.

    An element that is NaN or infinite is left out of the average of its place. Nothing waits for the device.
    """

    def __init__(self, store: Store, name: str, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"the decay of {name!r} is a number from 0 to below 1, not {decay}")
        self._store = store
        self._decay = decay
        self._sum, self._weight, self._count = f"{name}/ema", f"{name}/ema/weight", f"{name}/ema/count"

    def add(self, x: Tensor | float) -> None:
        """Take in a number or a tensor.

        Raises:
            ValueError: for a tensor of another shape than the first.
        """
        held = self._store.get(self._sum)
        x = take_in(x, None if held is None else held.device)
        if held is None:
            self._store.put(self._sum, torch.zeros_like(x))
            self._store.put(self._weight, torch.zeros_like(x.real))
            self._store.put(self._count, torch.zeros((), dtype=torch.long, device=x.device))
        elif held.shape != x.shape:
            raise ValueError(f"the average {self._sum!r} is of shape {tuple(held.shape)}, not {tuple(x.shape)}")
        names = (self._sum, self._weight, self._count)
        old, weight, count = (self._store.get(name, device=x.device) for name in names)
        new = torch.lerp(old, x if x.dtype is old.dtype else x.to(old.dtype), 1 - self._decay)
        finite = is_finite(new)  # not so where x is not, or is too far from the old one to take the difference
        self._store.put_own(self._sum, torch.where(finite, new, old))
        self._store.put_own(self._weight, torch.lerp(weight, torch.maximum(weight, finite), 1 - self._decay))
        self._store.put_own(self._count, count + (finite.any() if finite.ndim else finite))

    def start(self, value: Tensor | float) -> None:
        """Forget what came and begin at ``value``; where it is not finite, begin with nothing."""
        value = take_in(value)
        finite = is_finite(value)
        self._store.put(self._sum, torch.where(finite, value, 0))
        self._store.put(self._weight, finite.to(value.real.dtype))
        self._store.put(self._count, finite.any().long())

    @property
    def is_new(self) -> bool:
        """True if neither ``add`` nor ``start`` was ever called."""
        return self._sum not in self._store

    @property
    def value(self) -> Tensor:
        """The average, float32 or wider, of the shape of what came; NaN where nothing finite has come."""
        held = self._store.get(self._sum)
        return make_empty() if held is None else held / self._store.get(self._weight, device=held.device)

    @property
    def count(self) -> Tensor:
        """The number of times that something finite has come, int64, without dimensions."""
        count: Tensor | None = self._store.get(self._count)
        return torch.tensor(0) if count is None else count
