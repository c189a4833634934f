"""The last few numbers, or tensors, that came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

import torch
from torch import Tensor

from retrograd.rewriting.memory.store import Store, is_finite, make_empty, take_in


class LastTensors:
    """The last ``size`` tensors, oldest first: ``last[-1]`` is the newest. They are detached.

    They are held by reference, which costs nothing but keeps them alive. A gradient that flows through the graph is
    not written into afterwards and needs no copy. Ask for one where somebody writes into the tensor later: the
    gradient of a parameter, to which further passes are added, and an activation that an in-place layer follows.

    Tensors are kept as they are, with the NaN that are in them.
    """

    def __init__(self, store: Store, name: str, size: int) -> None:
        if size < 1:
            raise ValueError(f"{name!r} keeps a whole number of tensors, at least 1, not {size}")
        self._store = store
        self._size = size
        self._name = f"{name}/last"

    def add(self, x: Tensor, *, copy: bool = False) -> None:
        """Keep a tensor, and let go of the oldest when there are too many.

        Args:
            x: any tensor.
            copy: keep a copy of it.
        """
        if copy:
            self.add_own(x.detach().clone())
        else:
            self._store.append(self._name, x, self._size)

    def add_own(self, x: Tensor) -> None:
        """As :meth:`add`, for a copy that was made of a detached tensor, and that nobody else has."""
        self._store.append_own(self._name, x, self._size)

    def __len__(self) -> int:
        return min(len(self._store.get(self._name, ())), self._size)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        held: tuple[Tensor, ...] = self._store.get(self._name, ())[-self._size :]
        return held[index]


_FIRST_CAPACITY = 64


class Window:
    """The last ``size`` finite numbers; with a size of None, the whole past.

    A window holds a ring of ``size`` numbers. The whole past is held sorted, so that a quantile is looked up and not
    sorted for; it takes four bytes a number (eight in float64), at most doubled. A number that is NaN or infinite
    does not enter. Nothing waits for the device.
    """

    def __init__(self, store: Store, name: str, size: int | None) -> None:
        if size is not None and size < 1:
            raise ValueError(f"the window {name!r} holds a whole number of values, at least 1, not {size}")
        self._store = store
        self._size = size
        self._values, self._count, self._offered = f"{name}/window", f"{name}/window/count", f"{name}/window/offered"

    def add(self, x: Tensor | float) -> None:
        """Take in a number: a real tensor of one element, or a float.

        Raises:
            ValueError: for more than one element, a complex number, or another size of the window than before.
        """
        held = self._store.get(self._values)
        x = take_in(x, None if held is None else held.device)
        if x.numel() != 1 or x.is_complex():
            raise ValueError(f"the window {self._values!r} takes one real number at a time, not {tuple(x.shape)}")
        x = x.reshape(())
        offered = self._store.get(self._offered, 0)
        values = self._make_room(x, offered)
        count = self._store.get(self._count, device=x.device)
        count = x.new_zeros((), dtype=torch.long) if count is None else count
        index = torch.arange(len(values), device=x.device)
        finite = is_finite(x)
        if self._size is None:
            place = ((values <= x) & (index < count)).sum()
            moved_on = torch.where(index == place, x, values.roll(1))
            added = torch.where(finite & (index >= place), moved_on, values)
        else:
            added = torch.where(finite & (index == count % self._size), x, values)
        self._store.put(self._values, added)
        self._store.put(self._count, count + finite)
        self._store.put(self._offered, offered + 1)

    def quantile(self, q: float) -> Tensor:
        """The value below which the share ``q`` of the numbers lies, between two of them by linear interpolation.

        As ``numpy.quantile``; NaN when there is no number.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile is asked for by a share from 0 to 1, not {q}")
        values = self._store.get(self._values)
        if values is None:
            return make_empty()
        if self._size is not None:
            values = torch.where(self._is_held(values), values, torch.inf).sort().values
        count = self.count
        position = q * (count - 1).to(values.dtype)
        below = position.floor()
        low, high = torch.take(values, below.long()), torch.take(values, position.ceil().long())
        return torch.where(count > 0, torch.lerp(low, high, position - below), torch.nan)

    @property
    def mean(self) -> Tensor:
        """Mean of the numbers; NaN when there is none."""
        return self._sum_up()[0]

    @property
    def std(self) -> Tensor:
        """Standard deviation of the numbers, divided by n − 1; NaN when there are fewer than two."""
        return self.std_mean[0]

    @property
    def std_mean(self) -> tuple[Tensor, Tensor]:
        """``std`` and ``mean``, for the price of one."""
        mean, squares, count = self._sum_up()
        return (squares / (count - 1).clamp(min=0)).sqrt(), mean

    @property
    def variance(self) -> Tensor:
        """Mean squared distance of the numbers from their mean, divided by n; NaN when there is none."""
        _, squares, count = self._sum_up()
        return squares / count

    @property
    def value(self) -> Tensor:
        """The median; NaN when there is no number."""
        return self.quantile(0.5)

    @property
    def count(self) -> Tensor:
        """The number of numbers that are held, int64."""
        count: Tensor | None = self._store.get(self._count)
        if count is None:
            return torch.tensor(0)
        return count if self._size is None else count.clamp(max=self._size)

    def _make_room(self, x: Tensor, offered: int) -> Tensor:
        """The numbers held, with a free place in the whole past."""
        values: Tensor | None = self._store.get(self._values, device=x.device)
        if values is None:
            return x.new_zeros(self._size or _FIRST_CAPACITY)
        if self._size is None:
            return torch.cat([values, torch.zeros_like(values)]) if offered >= len(values) else values
        if len(values) != self._size:
            raise ValueError(f"the window {self._values!r} was made for {len(values)} numbers, not {self._size}")
        return values

    def _sum_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean, the sum of the squared distances from it, and how many numbers they are of."""
        count, values = self.count, self._store.get(self._values)
        if values is None:
            return make_empty(), make_empty(), count
        held = self._is_held(values)
        mean = (torch.where(held, values, 0) / count).sum()  # divided one by one, for the sum may be too large
        return mean, torch.where(held, values - mean, 0).square().sum(), count

    def _is_held(self, values: Tensor) -> Tensor:
        return torch.arange(len(values), device=values.device) < self.count
