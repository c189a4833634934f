"""How many bytes of saved tensors are in memory, counted by other means: by which storages are alive, at every operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.saved.keeper import Keeper


class Token:
    """Stands in the graph for a saved tensor, and knows which storages there have been for it."""

    def __init__(self, inner: Any, storage: torch.UntypedStorage) -> None:
        self.inner = inner
        self.storages = [weakref.ref(storage)]


class Counter(TorchDispatchMode):
    """Counts storages that are alive and for which a saved tensor still waits: each once, before every operation.

    Attributes:
        peak: the most that was seen.
    """

    def __init__(self, is_counted: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.tokens: weakref.WeakSet[Token] = weakref.WeakSet()
        self.is_counted = is_counted
        self.peak = 0

    def count(self) -> None:
        alive = {}
        for token in self.tokens:
            for reference in token.storages:
                storage = reference()
                if storage is not None:
                    alive[storage._cdata] = storage.nbytes()
        self.peak = max(self.peak, sum(alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count()
        return func(*args, **(kwargs or {}))


@contextmanager
def count_residency(
    patch: pytest.MonkeyPatch, is_counted: Callable[[Tensor], bool]
) -> Iterator[Counter]:
    """Count while a block runs, around the hooks of policies that were put in charge within it."""
    counter = Counter(is_counted)
    plain_pack, plain_unpack = Keeper.pack, Keeper.unpack

    def pack(keeper: Keeper, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        inner = plain_pack(keeper, tensor)
        if not counter.is_counted(tensor):
            return inner
        token = Token(inner, storage)
        counter.tokens.add(token)
        counter.count()
        return token

    def unpack(keeper: Keeper, packed: Any) -> Tensor:
        if not isinstance(packed, Token):
            return plain_unpack(keeper, packed)
        tensor = plain_unpack(keeper, packed.inner)
        packed.storages.append(weakref.ref(tensor.untyped_storage()))
        counter.count()
        return tensor

    with patch.context() as scope:
        scope.setattr(Keeper, "pack", pack)
        scope.setattr(Keeper, "unpack", unpack)
        with counter:
            yield counter
