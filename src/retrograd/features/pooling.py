"""From the feature of a sample to fewer numbers: a mean or a maximum over places, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor

from retrograd.errors import FeatureError

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
    raise FeatureError(f"pool={pool!r} is no way to pool.", repair="give 'mean', 'max', a function, or None.")


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
