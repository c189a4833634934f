"""What a recording should say, found without it: plain hooks that copy tensors, and float64 formulas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.recording.collector import Seen


@dataclass
class Oracle:
    """Copies of what went through each module, by path and call.

    ``gradients[path][call]`` has one gradient for each backward pass that came by.
    """

    values: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    gradients: dict[str, list[list[torch.Tensor]]] = field(default_factory=lambda: defaultdict(list))


@contextmanager
def listen(model: nn.Module) -> Iterator[Oracle]:
    """Hooks on all modules that return one tensor. Not for checkpointed or in-place modules."""
    oracle = Oracle()
    handles = []
    for path, module in model.named_modules():

        def copy(module: nn.Module, args: Any, output: Any, path: str = path or "self") -> None:
            if not isinstance(output, torch.Tensor):
                return
            oracle.values[path].append(output.detach().clone())
            gradients: list[torch.Tensor] = []
            oracle.gradients[path].append(gradients)
            if output.requires_grad:
                output.register_hook(lambda gradient: gradients.append(gradient.detach().clone()))

        handles.append(module.register_forward_hook(copy))
    try:
        yield oracle
    finally:
        for handle in handles:
            handle.remove()


def assert_row(row: Seen, *tensors: torch.Tensor) -> None:
    """The row is that of these tensors, merged."""
    x = torch.cat([_elements(tensor) for tensor in tensors])
    finite = x[x.isfinite()]
    assert row.calls == len(tensors)
    assert row.count == x.numel()
    assert row.nan == x.isnan().sum()
    assert (row.pos_inf, row.neg_inf) == (x.isposinf().sum(), x.isneginf().sum())
    assert row.zeros == (x == 0).sum()
    if not finite.numel():
        return
    close = {"rel": 1e-5, "abs": 1e-6 * finite.abs().max().item() + 1e-300}
    assert (row.min, row.max) == (finite.min(), finite.max())
    assert row.mean == pytest.approx(finite.mean().item(), **close)
    assert row.rms == pytest.approx(finite.square().mean().sqrt().item(), **close)
    assert row.std == pytest.approx(finite.std(correction=0).item(), **close)
    assert row.l1 == pytest.approx(finite.abs().sum().item(), rel=1e-5)
    magnitudes = finite[finite != 0].abs()
    assert row.bins.sum() == magnitudes.numel()


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1).to(torch.float64)
