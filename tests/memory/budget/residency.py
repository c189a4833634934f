"""How many bytes of saved tensors are in memory, by other means: which storages are alive at every operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.memory.policies.disk import Spilled
from retrograd.memory.saved.keeper import Keeper


class Token:
    """Stands in the graph for a saved tensor, and knows which storages there have been for it."""

    def __init__(self, inner: Any, storage: torch.UntypedStorage) -> None:
        self.inner = inner
        self.storages = [weakref.ref(storage)]


class Counter(TorchDispatchMode):
    """Counts storages that are alive and for which a saved tensor still waits: each once, before every operation.

    Attributes:
        read_memory: memory that was read from the disk before it was asked for; storages are made of it then.
        peak: the most that was seen.
    """

    def __init__(self, is_counted: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.tokens: weakref.WeakSet[Token] = weakref.WeakSet()
        self.is_counted = is_counted
        self.read_memory: list[weakref.ref[memoryview]] = []
        self.peak = 0

    def count(self) -> None:
        alive = {}
        for reference in [reference for token in self.tokens for reference in token.storages]:
            storage = reference()
            if storage is not None:
                alive[storage.data_ptr()] = storage.nbytes()
        for lease in self.read_memory:
            memory = lease()
            if memory is not None:
                alive[np.frombuffer(memory, dtype=np.uint8).ctypes.data] = len(memory)
        self.peak = max(self.peak, sum(alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count()
        return func(*args, **(kwargs or {}))


@contextmanager
def count_residency(patch: pytest.MonkeyPatch, is_counted: Callable[[Tensor], bool]) -> Iterator[Counter]:
    """Count while a block runs. What is read ahead is there at once, as if the disk took no time."""
    counter = Counter(is_counted)
    plain_pack, plain_unpack = Keeper.pack, Keeper.unpack
    plain_fetch = Spilled.fetch

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

    def fetch(load: Spilled) -> None:
        plain_fetch(load)
        coming = load.coming
        if coming is not None:
            coming[0].wait()
            memory = coming[0].memory
            assert memory is not None
            counter.read_memory.append(weakref.ref(memory))

    with patch.context() as scope:
        scope.setattr(Spilled, "fetch", fetch)
        scope.setattr(Keeper, "pack", pack)
        scope.setattr(Keeper, "unpack", unpack)
        with counter:
            yield counter
