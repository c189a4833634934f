"""Items of a loader: the model's input and the target in them, and how to begin in the middle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from retrograd.core.errors import FeatureError
from retrograd.core.hooks.nested import flatten, replace_tensors
from retrograd.tools.features.extractor import read_batch

Part = str | int | Callable[[Any], Any]
"""A part of what a loader yields: its key, its index, or a function that finds it."""

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def find_input(item: Any, inputs: Part | None, target: Part | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for the model: by default the first of a tuple or list, and all of a dict but the target."""
    if inputs is not None:
        return read_batch(_find_part(item, inputs, "inputs"))
    if isinstance(item, (tuple, list)) and item:
        return read_batch(item[0])
    if isinstance(item, Mapping):
        return (), {key: value for key, value in item.items() if key != target}
    return read_batch(item)


def find_target(item: Any, target: Part) -> Tensor:
    """The target of each sample.

    Raises:
        FeatureError: it is not a tensor.
    """
    found = _find_part(item, target, "target")
    if not isinstance(found, Tensor):
        raise FeatureError(
            f"target={target!r} gives a {type(found).__name__}, not a tensor.",
            repair="give a function that makes a tensor of it.",
        )
    return found.detach().to("cpu", copy=True)


def move(arguments: Any, device: torch.device | str | None) -> Any:
    """A nest with its tensors on a device; None leaves them where they are."""
    if device is None:
        return arguments
    moved = {keys: tensor.to(device, non_blocking=True) for keys, tensor in flatten(arguments, ())}
    return replace_tensors(arguments, (), moved)


def count_samples(arguments: Any) -> int:
    """Count samples: the first dimension of the first tensor that the model is given.

    Raises:
        FeatureError: there is no tensor.
    """
    for _, tensor in flatten(arguments, ()):
        if tensor.dim():
            return tensor.shape[0]
    raise FeatureError(
        "The loader gives the model no tensor, so its samples cannot be counted.",
        repair="say by `inputs=` where the model's input is in what the loader yields.",
    )


def check_order(loader: Iterable[Any], *, allow_shuffle: bool) -> None:
    """Make sure that the loader gives the same order each time, as far as can be told.

    Raises:
        FeatureError: it shuffles.
    """
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    for sampler in samplers:
        shuffles = isinstance(sampler, _SHUFFLING) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)
        if shuffles and not allow_shuffle:
            raise FeatureError(
                f"The loader shuffles: it has a {type(sampler).__name__}.",
                repair="make one with shuffle=False; or pass allow_shuffle=True if its order is the same each time.",
                reason="row i must be sample i, also when an interrupted extraction goes on.",
            )


def count_batches(loader: Iterable[Any]) -> int | None:
    """Count the batches; None where the loader does not tell."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def skip_batches(loader: Iterable[Any], count: int) -> Iterator[Any]:
    """Go through a loader after so many batches. A plain ``DataLoader`` in plain order does not even load those."""
    if count and type(loader) is DataLoader and _is_in_plain_order(loader.batch_sampler):
        return iter(_load_only(list(itertools.islice(loader.batch_sampler, count, None)), loader))
    return itertools.islice(iter(loader), count, None)


def _is_in_plain_order(sampler: object) -> TypeGuard[BatchSampler]:
    """Others may draw random numbers, which a loader that begins in the middle would draw at another time."""
    return type(sampler) is BatchSampler and type(sampler.sampler) is SequentialSampler


def _load_only(batches: list[list[Any]], loader: DataLoader[Any]) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )


def _find_part(item: Any, part: Part, option: str) -> Any:
    if callable(part):
        return part(item)
    try:
        return item[part]
    except (KeyError, IndexError, TypeError):
        kind = f"a dict of {', '.join(map(repr, item))}" if isinstance(item, Mapping) else f"a {type(item).__name__}"
        raise FeatureError(
            f"{option}={part!r} is not in what the loader yields: {kind}.", repair="give a key, an index or a function."
        ) from None
