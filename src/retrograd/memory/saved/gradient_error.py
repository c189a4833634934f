"""The error that a policy which rounds makes in the gradients of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from retrograd.core.errors import SavedTensorError
from retrograd.core.hooks.names import walk_parameters
from retrograd.core.norms import norm
from retrograd.core.trials import check_loss, check_loss_function, everything_restored
from retrograd.memory.policies.policy import AsIs
from retrograd.memory.saved.keeping import Policies, keep_saved


@dataclass(frozen=True)
class GradientError:
    """The distance of gradients from those that are computed from saved tensors as they were.

    Attributes:
        total: relative error of the whole gradient, √(Σ (g − ĝ)² / Σ g²) over all parameters.
        parameters: the same for each parameter by itself, by name; the largest first. 0 where both are zero.
    """

    total: float
    parameters: dict[str, float]


def measure_gradient_error(model: nn.Module, policy: Policies, loss: Callable[[], Tensor]) -> GradientError:
    """Compute the gradients of a batch twice, with saved tensors as they are and under a policy, and compare them.

    Parameters, their ``.grad``, buffers and random states are afterwards what they were.

    Args:
        model: whose trainable parameters are compared.
        policy: as for :func:`~retrograd.memory.saved.keeping.keep_saved`.
        loss: runs the model on a batch, always the same, and returns a scalar.

    Raises:
        SavedPolicyError: ``policy`` is not a policy.
        SavedTensorError: ``loss`` is not a function, or what it returns cannot start a backward pass of this model
            from.
    """
    check_loss_function(loss)
    exact = _gradients(model, AsIs(), loss)
    coarse = _gradients(model, policy, loss)
    squares = {name: _sum_of_squares(exact[name] - coarse[name]) for name in exact}
    norms = {name: _sum_of_squares(gradient) for name, gradient in exact.items()}
    errors = {name: _relative(squares[name], norms[name]) for name in exact}
    largest_first = dict(sorted(errors.items(), key=lambda item: item[1], reverse=True))
    return GradientError(_relative(sum(squares.values()), sum(norms.values())), largest_first)


def _gradients(model: nn.Module, policy: Policies, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in reversed(list(walk_parameters([("", model)])))}
    trained = {names[parameter]: parameter for parameter in model.parameters() if parameter.requires_grad}
    with everything_restored(model), keep_saved(model, policy):
        value = loss()
        check_loss(value)
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True) if trained else ()
    gradients = {name: gradient for name, gradient in zip(trained, found, strict=True) if gradient is not None}
    if not gradients:
        raise SavedTensorError(
            "The loss has no gradient for any parameter of the model.",
            repair="give the model that the loss function runs, with parameters that require grad.",
            reason="there is nothing to compare.",
        )
    return gradients


def _sum_of_squares(values: Tensor) -> float:
    return float(norm(values.to_dense(), at_least=torch.float64)) ** 2


def _relative(squares: float, of: float) -> float:
    return (squares / of) ** 0.5 if of else (float("inf") if squares else 0.0)
