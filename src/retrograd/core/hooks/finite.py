"""Whether tensors are finite, read in a way that leaves no trace in a program."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrograd.core.hooks.dispatch import carry_out_unseen
from retrograd.core.hooks.engine import dispatch_modes, is_jit_tracing, is_tracing, is_transformed, without_functions
from retrograd.core.hooks.nodes import is_saved_tensor, peek, saved_of


def is_fine(tensor: Tensor) -> bool:
    """Tell whether all elements are finite; true of what has none to be read."""
    if not tensor.is_floating_point() or is_transformed(tensor) or is_tracing():
        return True
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta or is_jit_tracing():
        return True
    if dispatch_modes():
        return carry_out_unseen(lambda: bool(tensor.detach().isfinite().all()))
    if tensor.numel() == 1:
        return math.isfinite(tensor.item())
    values = tensor.detach()
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


def name_bad(tensor: Tensor | None) -> str:
    """Name what a tensor holds that is not finite, the worst of it: ``NaN``, ``inf``, ``−inf``; empty for nothing."""
    if tensor is None or is_fine(tensor):
        return ""
    values = tensor.detach()
    held = {"NaN": values.isnan(), "inf": values == torch.inf, "−inf": values == -torch.inf}
    return next((name for name, where in held.items() if bool(where.any())), "")


def are_fine(tensors: list[Tensor]) -> bool:
    """Tell whether these are finite, by a norm of each; False where one may not be, and has to be looked at."""
    if not tensors or dispatch_modes() or is_jit_tracing() or is_tracing():
        return not tensors
    with torch.no_grad(), without_functions():
        if not all(map(_has_norm, tensors)) or len({each.device for each in tensors}) > 1:
            return False
        return all(map(math.isfinite, torch.stack(torch._foreach_norm(tensors)).tolist()))


def _has_norm(tensor: Tensor) -> bool:
    is_plain = type(tensor) in _PLAIN and tensor.is_floating_point() and not is_transformed(tensor)
    return is_plain and tensor.layout is torch.strided and not tensor.is_meta


_PLAIN = (Tensor, torch.nn.Parameter)


def read_saved(node: Any) -> dict[str, Any]:
    """Read all that a node has saved: tensors, detached, and plain values."""
    found: dict[str, Any] = {}
    for name, value in saved_of(node).items():
        if is_saved_tensor(value):
            tensor = peek(value)
            if tensor is not None:
                found[name] = tensor
        elif not isinstance(value, list | tuple) or not any(map(is_saved_tensor, value)):
            found[name] = value
    return found
