"""Kept tensors: how they are read, and the last of each site held by reference within a budget of bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, overload

from retrograd.core.history.sink import KeptTensor, Moment, Phase
from retrograd.core.sites.site import parse_leniently

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept tensor.

    Attributes:
        moment: when it was kept.
        site: where.
        load: returns the tensor, or None if it was overwritten.
        rank: the rank that kept it.
    """

    moment: Moment
    site: str
    load: Callable[[], torch.Tensor | None]
    rank: int = 0

    @property
    def step(self) -> int:
        return self.moment.step

    @property
    def micro(self) -> int:
        return self.moment.micro

    @property
    def backward(self) -> int:
        return self.moment.backward

    @property
    def phase(self) -> Phase:
        return self.moment.phase

    @property
    def call(self) -> int:
        """Number of the module's call, from 1."""
        return parse_leniently(self.site).call

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor with the loss scale divided out; None if training changed it in place since."""
        return self.load()

    @property
    def overwritten(self) -> bool:
        """True if training changed the tensor in place after it was kept, so that it is lost."""
        return self.load() is None

    def __repr__(self) -> str:
        tensor = self.tensor
        what = "overwritten" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        return f"Kept({self.site!r}, step {self.step}, {what})"


class KeptTensors(list[Kept]):
    """Kept tensors of a site, oldest first.

    Args:
        kept: the tensors, in that order.
        explain: makes the error that indexing an empty list raises.
    """

    def __init__(self, kept: Iterable[Kept], explain: Callable[[], Exception]) -> None:
        super().__init__(kept)
        self._explain = explain

    @overload
    def __getitem__(self, index: SupportsIndex) -> Kept: ...
    @overload
    def __getitem__(self, index: slice) -> list[Kept]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Kept | list[Kept]:
        if not self and not isinstance(index, slice):
            raise self._explain()
        return super().__getitem__(index)


def read_kept(kept: KeptTensor) -> Kept:
    """Read a tensor that is still held by reference."""
    return Kept(kept.moment, kept.site, lambda: None if is_overwritten(kept) else unscale(kept.tensor, kept.scale))


def pack_kept(kept: Kept) -> tuple[Moment, str, torch.Tensor | None, int]:
    """A kept tensor as data that can be pickled: the tensor itself, or None if it was overwritten."""
    return kept.moment, kept.site, kept.load(), kept.rank


def unpack_kept(packed: tuple[Moment, str, torch.Tensor | None, int]) -> Kept:
    """The kept tensor of such data."""
    moment, site, tensor, rank = packed
    return Kept(moment, site, lambda: tensor, rank)


def is_overwritten(kept: KeptTensor) -> bool:
    """Return whether the tensor has been changed in place since it was kept; once seen, the answer stays yes.

    A tensor made in inference mode counts no versions, so a copy of it must be kept.
    """
    if not kept.tensor.is_inference() and kept.tensor._version != kept.version:
        kept.overwritten = True
    return kept.overwritten


def unscale(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """Divide the loss scale out. Half precision becomes float32, because small gradients would underflow."""
    if scale == 1.0:
        return tensor
    return (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor) / scale


class TensorRing:
    """Holds the last tensors of each site by reference, within a budget of bytes.

    Args:
        last: how many of each site; None for as many as the budget allows.
        budget: bytes of all tensors together, never exceeded: the oldest are dropped to make room, and a tensor larger
            than the whole budget is not kept.
    """

    def __init__(self, last: int | None = None, budget: int = 1 << 30) -> None:
        self.last = last
        self.budget = budget
        self.bytes = 0
        self.dropped = 0
        self._held: dict[int, KeptTensor] = {}  # in order of arrival
        self._of_site: dict[str, deque[int]] = {}
        self._next = 0
        self._lock = threading.Lock()

    def add(self, kept: KeptTensor) -> int:
        """Keep a tensor; returns how many were dropped to make room."""
        with self._lock:
            size = count_bytes(kept.tensor)
            site = self._of_site.setdefault(kept.site, deque())
            if self.last is not None and len(site) >= self.last:
                self._remove(site[0])
            dropped = 0
            while self._held and self.bytes + size > self.budget:
                self._remove(next(iter(self._held)))
                dropped += 1
            if size > self.budget:
                dropped += 1
            else:
                self._held[self._next] = kept
                site.append(self._next)
                self._next += 1
                self.bytes += size
            self.dropped += dropped
            return dropped

    def of_site(self, site: str) -> list[KeptTensor]:
        """Tensors held of a site, oldest first."""
        with self._lock:
            return [self._held[number] for number in self._of_site.get(site, ())]

    def _remove(self, number: int) -> None:
        kept = self._held.pop(number)
        self._of_site[kept.site].popleft()
        self.bytes -= count_bytes(kept.tensor)


def count_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one, of what it stores."""
    if tensor.is_sparse:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes if str(tensor.layout) == "torch.strided" else tensor.values().nbytes
