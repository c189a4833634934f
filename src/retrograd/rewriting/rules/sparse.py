"""Rules on sparse gradients, as nn.Embedding(sparse=True) gives them, and on jagged tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def is_sparse(value: Tensor) -> bool:
    """Return whether a tensor is sparse in COO layout."""
    return value.layout is torch.sparse_coo


def is_packed(value: Tensor) -> bool:
    """Return whether a tensor is nested in jagged layout, and its values are its elements alone, without gaps."""
    return value.layout is torch.jagged and value.is_contiguous() and value.lengths() is None  # type: ignore[attr-defined]


def on_values(value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change all elements by a function that leaves zero as it is: of a sparse tensor only those that are stored."""
    if value.layout is not torch.sparse_coo:
        return change(value)
    value = value.coalesce()
    return torch.sparse_coo_tensor(
        value.indices(), change(value.values()), value.shape, is_coalesced=True, check_invariants=False
    )
