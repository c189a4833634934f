"""A gradient on its way from one node to the next: reduced, cast and added up as the engine does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.errors import ReplayError
from retrograd.hooks.nodes import edges_of, inputs_of, name_of, variable_of


class GradientSpec(NamedTuple):
    """A gradient that a node takes.

    Attributes:
        shape: None for nested tensors, whose shape is not looked at.
        dtype: None where any will do.
        device: where it is to be.
    """

    shape: torch.Size | None
    dtype: torch.dtype | None
    device: torch.device

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.") if self.dtype else "any dtype"
        where = "" if self.device.type == "cpu" else f" on {self.device}"
        return f"{dtype}{list(self.shape) if self.shape is not None else '[nested]'}{where}"


def wanted_by(node: Any) -> tuple[GradientSpec, ...]:
    """All gradients that a node takes."""
    leaf = variable_of(node)
    return tuple(
        [
            GradientSpec(
                None if each.is_nested_tensor else torch.Size(each.shape),
                each.dtype if leaf is None else _grad_dtype(leaf),
                each.device,
            )
            for each in inputs_of(node)
        ]
    )


def _grad_dtype(leaf: Tensor) -> torch.dtype | None:
    return getattr(leaf, "grad_dtype", leaf.dtype)  # older versions of torch have no such attribute


def fit(gradient: Tensor, wanted: GradientSpec) -> Tensor:
    """A gradient as the next node takes it: summed over dimensions that the forward had broadcast, and cast.

    Raises:
        ReplayError: it has no such shape, nor one that such a shape is broadcast to.
    """
    shape, dtype, device = wanted
    if shape is not None and gradient.shape != shape:
        gradient = _reduce(gradient, shape)
    if dtype is not None and gradient.dtype != dtype:
        gradient = gradient.to(dtype)
    if gradient.device != device and not gradient.dim():
        gradient = gradient.to(device)
    return gradient


class InputBuffer:
    """The gradients that have come in to a node, each as the node takes it, and added up.

    Attributes:
        gradients: the sums; None where nothing has come in.
    """

    __slots__ = ("_specs", "gradients")

    def __init__(self, node: Any) -> None:
        self._specs = wanted_by(node)
        self.gradients: list[Tensor | None] = [None] * len(self._specs)

    def add(self, slot: int, gradient: Tensor | None) -> None:
        """Another gradient comes in.

        Raises:
            ReplayError: it does not fit.
        """
        if gradient is None:
            return
        gradient = fit(gradient, self._specs[slot])
        before = self.gradients[slot]
        self.gradients[slot] = gradient if before is None else add(before, gradient)


def fit_outgoing(node: Any, outgoing: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients that a node returned, each as the node that it goes to takes it; as it is where it goes nowhere."""
    edges = edges_of(node)
    check_number(node, outgoing, edges)
    return tuple(
        [
            fit(gradient, wanted_by(following)[slot]) if gradient is not None and following is not None else gradient
            for gradient, (following, slot) in zip(outgoing, edges, strict=False)
        ]
    )


def check_number(node: Any, outgoing: Sequence[Tensor | None], edges: Sequence[Any]) -> None:
    """Raises ReplayError where a node returned fewer gradients than it has edges."""
    if len(outgoing) < len(edges):
        raise ReplayError(f"{name_of(node)} returned {len(outgoing)} gradients for {len(edges)} edges.")


def add(old: Tensor, new: Tensor) -> Tensor:
    """The sum of two gradients that come in to one node, in the order in which the engine adds them."""
    if old.layout != torch.strided and new.layout == torch.strided:
        return new + old
    return old + new


def add_to_grad(leaf: Tensor, gradient: Tensor) -> None:
    """Add to ``.grad`` as the node of a leaf does, without the hooks that run after it."""
    before = leaf.grad
    if before is None:
        leaf.grad = gradient.clone() if torch.is_grad_enabled() else _copy(gradient, leaf)
    elif torch.is_grad_enabled() or (before.layout != torch.strided and gradient.layout == torch.strided):
        leaf.grad = add(before, gradient)
    else:
        before += gradient


def _copy(gradient: Tensor, leaf: Tensor) -> Tensor:
    """A copy in the memory layout of the leaf, as torch promises it of ``.grad``."""
    if gradient.layout != torch.strided or leaf.layout != torch.strided or gradient.is_nested:
        return gradient.clone()
    return torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)


def _reduce(gradient: Tensor, shape: torch.Size) -> Tensor:
    try:
        return gradient.sum_to_size(shape)
    except RuntimeError as error:
        raise ReplayError(
            f"A gradient of shape {list(gradient.shape)} cannot be summed to {list(shape)}.",
            repair="look at the backward of the node that returned it.",
        ) from error
