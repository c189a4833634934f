"""A few elements of a tensor, to tell whether one that is computed again is the same."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from retrograd.hooks.dispatch import plain_torch
from retrograd.hooks.engine import dispatch_modes

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
