"""The tensors that a module is called with, under the names of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.hooks.arguments import ArgumentNames
from retrograd.hooks.nested import Keys, flatten


def name_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Keys, ...], Tensor]]:
    """Each tensor once, with the keys of all places where it is given: a query may be the key and the value too."""
    places: dict[int, list[Keys]] = {}
    tensors: dict[int, Tensor] = {}
    for keys, tensor in flatten(ArgumentNames(module).bind(args, kwargs), ("input",)):
        places.setdefault(id(tensor), []).append(keys)
        tensors[id(tensor)] = tensor
    for identity, tensor in tensors.items():
        yield tuple(places[identity]), tensor


def is_differentiable(tensor: Tensor) -> bool:
    """Whether derivatives with respect to it mean something, and can be taken element by element."""
    return (
        (tensor.is_floating_point() or tensor.is_complex())
        and tensor.numel() > 0
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
    )
