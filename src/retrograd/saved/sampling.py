"""A few elements of a tensor, to tell whether one that is computed again is the same."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from retrograd.hooks.dispatch import plain_torch
from retrograd.hooks.engine import dispatch_modes

_ELEMENTS = 16
_MOST_OF_A_DIMENSION = 4
Layout = tuple[list[int], list[int]]
"""Sizes and strides."""


def take_sample(tensor: Tensor) -> Tensor | None:
    """Some elements of a plain tensor as a vector in float64 on its device, which is not waited for.

    None where there are none, or where the device cannot be asked.
    """
    device = tensor.device.type
    if device not in ("cpu", "cuda") or not tensor.numel():
        return None
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    if not dispatch_modes():
        return _take(tensor.detach())
    with plain_torch():
        return _take(tensor)


def _take(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    some = tensor.as_strided(*_choose(tuple(tensor.size()), tensor.stride()))
    return some.to(torch.float64, copy=True).flatten()[:_ELEMENTS]


@lru_cache(maxsize=4096)
def _choose(size: tuple[int, ...], stride: tuple[int, ...]) -> Layout:
    """Where the elements are. What has fewer gives them several times."""
    sizes, strides = _choose_distinct(size, stride)
    count = math.prod(sizes)
    return ([math.ceil(_ELEMENTS / count), *sizes], [0, *strides]) if count < _ELEMENTS else (sizes, strides)


def _choose_distinct(size: tuple[int, ...], stride: tuple[int, ...]) -> Layout:
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


def are_apart(first: Tensor, second: Tensor, tolerance: float) -> Tensor:
    """Whether samples differ by more; with more than one dimension, each row by itself. A NaN tells nothing."""
    with plain_torch():
        return (second - first).abs().amax(-1) > tolerance * first.abs().amax(-1)
