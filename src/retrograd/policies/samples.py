"""A few elements of a tensor, which tell whether one that is recomputed is the same; no device is waited for."""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.hooks.dispatch import plain_torch
from retrograd.hooks.engine import dispatch_modes
from retrograd.policies.overwriting import SaveSite

_ELEMENTS = 16
_MOST_OF_A_DIMENSION = 4
Sample = Tensor | list[Any]
Layout = tuple[list[int], list[int]]
"""Sizes and strides."""


def take_sample(tensor: Tensor) -> Sample | None:
    """Some elements of a plain tensor; None where there are none, or where the device cannot be asked.

    Of a tensor on a CUDA device it is a vector in float64 there, which is not waited for. Else numbers, for to compare
    these takes a tenth of the time.
    """
    device = tensor.device.type
    if not tensor.numel() or device not in ("cpu", "cuda"):
        return None
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    take = _take_numbers if device == "cpu" else _take_vector
    if not dispatch_modes():
        return take(tensor.detach())
    with plain_torch():
        return take(tensor)


def _take_numbers(tensor: Tensor) -> list[Any]:
    numbers: list[Any] = tensor.as_strided(*_choose_distinct(tensor.size(), tensor.stride())).tolist()
    return numbers


def _take_vector(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    some = tensor.as_strided(*_choose(tensor.size(), tensor.stride()))
    return some.to(torch.float64, copy=True).flatten()[:_ELEMENTS]


def _choose(size: torch.Size, stride: tuple[int, ...]) -> Layout:
    """As many for every tensor, so that samples can be stacked: what has fewer gives them several times."""
    sizes, strides = _choose_distinct(size, stride)
    count = math.prod(sizes)
    return ([math.ceil(_ELEMENTS / count), *sizes], [0, *strides]) if count < _ELEMENTS else (sizes, strides)


@lru_cache(maxsize=4096)
def _choose_distinct(size: torch.Size, stride: tuple[int, ...]) -> Layout:
    """At equal distances in memory, from its first to about its last; a grid where memory has gaps."""
    total = math.prod(size)
    if total == 1 + sum((each - 1) * step for each, step in zip(size, stride, strict=True)):
        count = min(total, _ELEMENTS)
        return [count], [max(1, (total - 1) // max(1, count - 1))]
    sizes, strides, left = [], [], _ELEMENTS
    for each, step in sorted(zip(size, stride, strict=True), reverse=True):
        count = min(each, left, _MOST_OF_A_DIMENSION)
        left //= count
        sizes.append(count)
        strides.append(step * max(1, (each - 1) // max(1, count - 1)))
    return sizes, strides


def tolerance_of(dtype: torch.dtype) -> float:
    """How far elements may be apart, relative to the largest: more than rounding in another order makes of them."""
    return float(torch.finfo(dtype).eps) ** 0.5 if dtype.is_floating_point or dtype.is_complex else 0.0


def numbers_are_apart(first: list[Any], second: list[Any], tolerance: float) -> bool:
    """Whether samples of numbers differ by more."""
    if first == second:
        return False
    with plain_torch():
        one, other = (torch.tensor(each, device="cpu").flatten() for each in (first, second))
        if not one.is_complex():
            one, other = one.double(), other.double()
        return bool(are_apart(one, other, tolerance))


def are_apart(first: Tensor, second: Tensor, tolerance: float) -> Tensor:
    """Whether samples differ by more; with more than one dimension, each row by itself. A NaN tells nothing."""
    with plain_torch():
        return (second - first).abs().amax(-1) > tolerance * first.abs().amax(-1)


_MOST_NOTED = 64
"""Pairs that are compared at once, by six kernels."""
Key = tuple[torch.cuda.Stream, float]


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor
    site: SaveSite


class _Question(NamedTuple):
    answered: torch.cuda.Event
    are_apart: Tensor
    sites: list[SaveSite]


class LateComparison:
    """Pairs of samples, and the answers that are in flight to the host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[Key, list[_Pair]] = {}
        self._asked: list[_Question] = []

    def note(self, first: Tensor, second: Tensor, dtype: torch.dtype, site: SaveSite) -> SaveSite | None:
        """Compare two samples some time.

        Returns:
            A site of which earlier samples were not the same, if that is known by now.
        """
        key = torch.cuda.current_stream(second.device), tolerance_of(dtype)
        with self._lock:
            pairs = self._noted.setdefault(key, [])
            pairs.append(_Pair(first, second, site))
            if len(pairs) >= _MOST_NOTED:
                self._asked.append(_ask(key, self._noted.pop(key)))
            return self._read(is_end=False)

    def end(self) -> SaveSite | None:
        """Wait for the device; a site of which samples were not the same."""
        with self._lock:
            while self._noted:
                self._asked.append(_ask(*self._noted.popitem()))
            return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> SaveSite | None:
        while self._asked and (is_end or self._asked[0].answered.query()):
            question = self._asked.pop(0)
            question.answered.synchronize()
            for site, is_apart in zip(question.sites, question.are_apart.tolist(), strict=True):
                if is_apart:
                    return site
        return None


def _ask(key: Key, pairs: list[_Pair]) -> _Question:
    stream, tolerance = key
    with torch.cuda.stream(stream):  # the samples were taken on it
        first, second = torch.stack([pair.first for pair in pairs]), torch.stack([pair.second for pair in pairs])
        read = _allocate(len(pairs))
        read.copy_(are_apart(first, second, tolerance), non_blocking=True)
        return _Question(stream.record_event(), read, [pair.site for pair in pairs])


def _allocate(count: int) -> Tensor:
    """Memory that a device copies to while the program goes on."""
    return torch.empty(count, dtype=torch.bool, pin_memory=True)
