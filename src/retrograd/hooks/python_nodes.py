"""What torch does around the backward of a Python ``Function``, done for a node that is run alone.

``node.apply`` is the program's own ``backward``. The engine hands it zeros for gradients that are undefined, unless the
``Function`` asked for None, and drops what it returns for arguments that are no tensors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def run_python(node: Any, incoming: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Run the node of a Python ``Function`` as the engine would.

    Returns:
        One gradient for each of the node's edges.
    """
    if any(gradient is None for gradient in incoming):
        incoming = _materialize(node, incoming)
    result = node.apply(*incoming)
    return _match_edges(node, result if isinstance(result, tuple) else (result,))


def _materialize(node: Any, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Zeros for undefined gradients. Torch does not tell the shape of an output without derivative: its is a scalar."""
    if not _wants_zeros(node):
        return list(incoming)
    return [
        torch.zeros(each.shape, dtype=each.dtype, device=each.device)
        if gradient is None and not each.is_cpp_nested_tensor
        else gradient
        for gradient, each in zip(incoming, node._input_metadata, strict=True)
    ]


def _match_edges(node: Any, result: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """One gradient for each tensor among the arguments, from one for each argument.

    Those that need a gradient are the edges that lead somewhere, in the same order. Where some arguments are no
    tensors, it cannot be told which of the others stand for edges that lead nowhere: there it is None.
    """
    edges = node.next_functions
    wanted = node.needs_input_grad
    given = len(result)
    if given < len(wanted) or any(extra is not None for extra in result[len(wanted) :]):
        raise RuntimeError(
            f"function {type(node).__name__} returned an incorrect number of gradients "
            f"(expected {len(wanted)}, got {given})"
        )
    if len(edges) == len(wanted):
        return result[: len(edges)]
    useful = iter([gradient for gradient, needed in zip(result, wanted, strict=False) if needed])
    return tuple([next(useful, None) if following is not None else None for following, _ in edges])


def _wants_zeros(node: Any) -> bool:
    """What the ``Function`` set by ``set_materialize_grads``; torch lets it be set, and not be read."""
    offset = _flag_offset()
    return offset is None or ctypes.string_at(id(node) + offset, 1) != b"\0"


@functools.cache
def _flag_offset() -> int | None:
    """Where that flag lies in the memory of a node, found by setting it; None if that cannot be told."""
    sample: Any = _Sample._backward_cls()
    size = torch._C._FunctionBase.__basicsize__
    sample.set_materialize_grads(True)
    with_it = ctypes.string_at(id(sample), size)
    sample.set_materialize_grads(False)
    without = ctypes.string_at(id(sample), size)
    changed = [offset for offset in range(size) if with_it[offset] != without[offset]]
    return changed[0] if len(changed) == 1 else None


class _Sample(torch.autograd.Function):
    """Its node is only looked at."""
