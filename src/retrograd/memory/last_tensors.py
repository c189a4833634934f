"""The last few tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

from torch import Tensor

from retrograd.memory.store import Store


class LastTensors:
    """The last ``size`` tensors, oldest first: ``last[-1]`` is the newest. They are detached.

    They are held by reference, which costs nothing but keeps them alive. A gradient that flows through the graph is
    not written into afterwards and needs no copy. Ask for one where somebody writes into the tensor later: the
    gradient of a parameter, to which further passes are added, and an activation that an in-place layer follows.

    Tensors are kept as they are, with the NaN that are in them.
    """

    def __init__(self, store: Store, name: str, size: int) -> None:
        if size < 1:
            raise ValueError(f"{name!r} keeps a whole number of tensors from 1 on, not {size}")
        self._store = store
        self._size = size
        self._name = f"{name}/last"

    def add(self, x: Tensor, *, copy: bool = False) -> None:
        """Keep a tensor, and let go of the oldest when there are too many.

        Args:
            x: any tensor.
            copy: keep a copy of it.
        """
        self._store.append(self._name, x.detach().clone() if copy else x, self._size)

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
