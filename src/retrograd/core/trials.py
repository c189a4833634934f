"""A step that is only tried: what it must leave as it was, and what its backward pass can start from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from retrograd.core.errors import SavedTensorError
from retrograd.core.randomness import random_kept


@contextmanager
def everything_restored(model: nn.Module) -> Iterator[None]:
    """Put buffers and the random state back at the end, also after an error."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    with random_kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, copy in buffers:
                    module._buffers[name] = buffer
                    buffer.data.copy_(copy)  # a graph that has saved it need not know: it is what it was


def check_loss_function(loss: object) -> None:
    """Make sure that it can be called.

    Raises:
        SavedTensorError: it is a tensor, or anything else but a function.
    """
    if not callable(loss):
        raise SavedTensorError(
            f"The loss must be a function, not a {type(loss).__name__}.",
            repair="give what computes it, such as lambda output: F.cross_entropy(output, labels).",
            reason="its forward must run while what it saves is observed.",
        )


def check_loss(value: object) -> None:
    """Make sure that what a loss function has returned is one real number with a graph.

    Raises:
        SavedTensorError: it is anything else.
    """
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise SavedTensorError(
            "Nothing of what the model returns needs a gradient.",
            repair="let parameters require grad; or give a loss function that returns a tensor with a graph.",
            reason="autograd keeps something only for a backward pass.",
        )
    if value.numel() != 1 or value.is_complex():
        raise SavedTensorError(
            f"The loss has shape {list(value.shape)} and {value.dtype}.",
            repair="let the loss function return one real number, as output.mean() is.",
            reason="a backward pass starts from one number.",
        )
