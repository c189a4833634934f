"""What a backward pass can start from."""

from __future__ import annotations

from torch import Tensor

from retrograd.errors import SavedTensorError


def check_loss_function(loss: object) -> None:
    """Make sure that it can be called.

    Raises:
        SavedTensorError: it is a tensor, or anything else but a function.
    """
    if not callable(loss):
        raise SavedTensorError(
            f"A loss is a function here, and not a {type(loss).__name__}.",
            repair="give what computes it, such as lambda output: F.cross_entropy(output, labels).",
            reason="its forward must run while what it saves is looked at.",
        )


def check_loss(value: object) -> None:
    """Make sure that what a loss function has returned is one real number with a graph.

    Raises:
        SavedTensorError: it is not.
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
