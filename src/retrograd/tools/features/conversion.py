"""Convert the value of a site to what is stored of it: pooled, of another dtype, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor

from retrograd.core.errors import FeatureError
from retrograd.core.hooks.nested import flatten

Pool = Literal["mean", "max"] | Callable[[Tensor], Tensor] | None


def find_pool(pool: Any) -> Callable[[Tensor], Tensor] | None:
    """The function that a ``pool=`` stands for.

    Raises:
        FeatureError: it stands for none.
    """
    if isinstance(pool, str) and pool in _NAMED:
        return _NAMED[pool]
    if pool is None or callable(pool):
        return cast("Callable[[Tensor], Tensor] | None", pool)
    raise FeatureError(f"pool={pool!r} is not a valid pool.", repair="give 'mean', 'max', a function, or None.")


def pool_mean(value: Tensor) -> Tensor:
    """The mean over all places: from [batch, tokens, channels] or [batch, channels, *places] to [batch, channels]."""
    if not (value.is_floating_point() or value.is_complex()):
        value = value.to(torch.get_default_dtype())
    places = _places(value)
    return value.mean(dim=places) if places else value


def pool_max(value: Tensor) -> Tensor:
    """The maximum over all places, as in :func:`pool_mean`; NaN where one is NaN."""
    places = _places(value)
    return value.amax(dim=places) if places else value


def describe_pool(pool: Any) -> str | None:
    """A pool as it is written in a manifest."""
    if pool is None or isinstance(pool, str):
        return pool
    name = getattr(pool, "__qualname__", type(pool).__qualname__)
    return f"{getattr(pool, '__module__', '')}.{name}"


_NAMED = {"mean": pool_mean, "max": pool_max}


def _places(value: Tensor) -> tuple[int, ...]:
    """The dimensions that are neither the batch nor channels."""
    return (1,) if value.dim() == 3 else tuple(range(2, value.dim()))


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
        """Convert a value, as a feature that waits for the forward's end."""
        if not isinstance(value, Tensor):
            there = ", ".join(f"{name}.{'.'.join(keys)}" for keys, _ in flatten(value, ())) or "no tensor"
            raise FeatureError(f"{name!r} is a {type(value).__name__}, not a tensor.", repair=f"there are: {there}.")
        pooled = value.detach() if self._pool is None else self._pool(value.detach())
        if not isinstance(pooled, Tensor) or pooled.layout is not torch.strided or pooled.dtype in _NOT_STORED:
            what = f"{pooled.dtype} {pooled.layout}" if isinstance(pooled, Tensor) else type(pooled).__name__
            raise FeatureError(
                f"{name!r} cannot be stored: it is {what}.",
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
