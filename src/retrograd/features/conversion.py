"""From what a site holds to what is stored of it: pooled, of another dtype, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrograd.errors import FeatureError
from retrograd.features.pooling import Pool, find_pool
from retrograd.hooks.nested import flatten

_NOT_STORED = frozenset({torch.complex128, torch.complex32})
"""Types that safetensors does not have."""


class Conversion:
    """Makes what is stored of each value at the moment that it is seen, so that nothing larger is held.

    Args:
        pool: as in :func:`extract_dataset`.
        dtype: for floating features; None leaves them as they are.
    """

    def __init__(self, pool: Pool, dtype: torch.dtype | str | None) -> None:
        self._pool = find_pool(pool)
        self._dtype = find_dtype(dtype)

    def hold(self, name: str, value: Any) -> Callable[[], Tensor]:
        """What is stored of a value, as a feature that waits for the forward's end."""
        if not isinstance(value, Tensor):
            there = ", ".join(f"{name}.{'.'.join(keys)}" for keys, _ in flatten(value, ())) or "no tensor"
            raise FeatureError(f"{name!r} is a {type(value).__name__}, not a tensor.", repair=f"there are: {there}.")
        pooled = value.detach() if self._pool is None else self._pool(value.detach())
        if not isinstance(pooled, Tensor) or pooled.layout is not torch.strided or pooled.dtype in _NOT_STORED:
            what = f"{pooled.dtype} {pooled.layout}" if isinstance(pooled, Tensor) else type(pooled).__name__
            raise FeatureError(
                f"What there is to store of {name!r} is {what}.",
                repair="give a function as `pool` that returns a dense tensor, complex64 at most.",
            )
        stored = self._convert(name, pooled)
        return lambda: stored

    def _convert(self, name: str, pooled: Tensor) -> Tensor:
        dtype = self._dtype if self._dtype is not None and pooled.is_floating_point() else pooled.dtype
        stored = pooled.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        if dtype != pooled.dtype and bool((pooled.isfinite() & ~stored.isfinite().to(pooled.device)).any()):
            raise FeatureError(
                f"{name!r} has values beyond {torch.finfo(dtype).max:.3g}, where {dtype} ends.",
                repair="take dtype=torch.bfloat16, or leave dtype out.",
            )
        return stored


def find_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that a ``dtype=`` names.

    Raises:
        FeatureError: it names no floating one.
    """
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise FeatureError(f"dtype={dtype!r} is not a floating type.", repair="give one such as torch.float16.")
    return found
