"""Torch's own differentiable operators, with the samples that torch itself is tested on.

Needs ``expecttest``, which torch's list of operators imports.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

DTYPES = (torch.float64, torch.complex128, torch.float32, torch.bfloat16, torch.float16)
"""The first of these that gives a result with a graph is taken."""

MOST = 30
"""Samples of an operator that are tried, where many give nothing with a graph."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of torch.

    Attributes:
        name: with its variant, as in ``"linalg.norm.subgradients_at_zero"``.
        dtypes: what its samples can be made of; none where it has no derivative on the CPU.
        info: torch's description of it.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    info: Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one sample gave.

    Attributes:
        tensors: those of the results that have a graph.
        gradients: something for each of them to begin a backward pass with.
    """

    tensors: list[Tensor]
    gradients: list[Tensor]


def find_operators(pattern: str = "*") -> list[Operator]:
    """All operators whose name matches."""
    named = ((f"{info.name}.{info.variant_test_name}".rstrip("."), info) for info in op_db)
    return [Operator(name, _find_dtypes(info), info) for name, info in named if fnmatch.fnmatch(name, pattern)]


def make_samples(operator: Operator, dtype: torch.dtype) -> Iterator[Any]:
    """What to call an operator with."""
    torch.manual_seed(0)
    samples: Iterator[Any] = islice(operator.info.sample_inputs("cpu", dtype, requires_grad=True), MOST)
    return samples


def run_sample(operator: Operator, sample: Any) -> Outcome | None:
    """Run the forward; None if nothing that comes of it has a graph."""
    torch.manual_seed(0)
    result = sample.output_process_fn_grad(operator.info(sample.input, *sample.args, **sample.kwargs))
    tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.grad_fn is not None]
    return Outcome(tensors, [_make_gradient(tensor) for tensor in tensors]) if tensors else None


def _find_dtypes(info: Any) -> tuple[torch.dtype, ...]:
    possible = info.supported_backward_dtypes("cpu") if info.supports_autograd else ()
    return tuple(dtype for dtype in DTYPES if dtype in possible)


def _make_gradient(tensor: Tensor) -> Tensor:
    if tensor.layout == torch.strided and not tensor.is_nested:
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return tensor.detach().clone()
