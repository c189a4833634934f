"""Rules that put the gradients of several backward passes together, such as PCGrad."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from retrograd.core.errors import RuleError
from retrograd.core.norms import add_up
from retrograd.rewriting.rules.checks import need_dense
from retrograd.rewriting.rules.rule import Rule, SiteState, next_seed


class PassRule(Rule):
    """Combines what several backward passes of one step, one a loss, give to the same parameters.

    Torch adds them up. Subclasses write :meth:`combine` instead.
    """

    def combine(self, passes: Sequence[Sequence[Tensor | None]], state: SiteState) -> list[Tensor | None]:
        """Combine the gradients of all passes into what shall be in ``.grad``.

        Args:
            passes: for each pass the gradients of all parameters, in the same order; None where a pass did not reach
                a parameter. None of them may be written into. Those of parameters that are spread over processes are
                ``DTensor``s, averaged over the processes that share a batch.
            state: one state for all parameters.

        Returns:
            A gradient a parameter; None where no pass reached it.
        """
        raise NotImplementedError

    def __call__(self, value: Tensor, state: SiteState) -> Tensor | None:
        """Always raises: one gradient alone is nothing to combine.

        Raises:
            RuleError: always.
        """
        raise RuleError(
            f"{type(self).__name__} combines several backward passes, and was given the gradient of one.",
            repair="use it on the parameters of a step with one backward pass a loss.",
        )


# ---- losses whose gradients point against each other ----

Gradients = Sequence[Tensor | None]


class PCGrad(PassRule):
    """Project the gradient of each loss off those that it conflicts with, then add them up.

        for each loss i, for each other loss j in random order:
            if gᵢ' · gⱼ < 0:   gᵢ' ← gᵢ' − (gᵢ' · gⱼ / ‖gⱼ‖²) gⱼ          gᵢ' begins as gᵢ; the gⱼ stay as they are
        g = Σ gᵢ'

    The products are over all parameters as one vector, in which a parameter that a loss does not reach counts as
    zero. A gradient that is not finite is projected nowhere, and makes the sum so, as without the rule.

    Source: Yu, Kumar, Gupta, Levine, Hausman & Finn 2020, arXiv 2001.06782, algorithm 1.

    Args:
        per_tensor: project the gradient of each parameter by itself.
        seed: what the order of the losses is drawn from.
    """

    def __init__(self, *, per_tensor: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.per_tensor = per_tensor
        self.seed = seed

    def combine(self, passes: Sequence[Gradients], state: SiteState) -> list[Tensor | None]:
        for gradient in (tensor for gradients in passes for tensor in gradients if tensor is not None):
            need_dense(self, gradient)
        order = random.Random(next_seed(self.seed, state))
        if not self.per_tensor:
            return _combine(passes, order)
        return [_combine([[tensor] for tensor in tensors], order)[0] for tensors in zip(*passes, strict=True)]


def _combine(passes: Sequence[Gradients], order: random.Random) -> list[Tensor | None]:
    """The sum of the projected gradients.

    All that is ever subtracted is a multiple of some gⱼ, so the products of the gⱼ with one another tell how much of
    each is in the sum, and no projected gradient is ever made.
    """
    products = [[_multiply(one, other) for other in passes] for one in passes]
    total: list[Tensor | float] = [0.0] * len(passes)
    for i in range(len(passes)):
        for j, weight in enumerate(_project(i, products, order)):
            total[j] = total[j] + weight
    return [_add_up(tensors, total) for tensors in zip(*passes, strict=True)]


def _project(i: int, products: list[list[Tensor]], order: random.Random) -> list[Tensor | float]:
    """The share of each gⱼ in gᵢ'."""
    weights: list[Tensor | float] = [float(j == i) for j in range(len(products))]
    others = [j for j in range(len(products)) if j != i]
    order.shuffle(others)
    for j in others:
        along = sum(weight * products[k][j] for k, weight in enumerate(weights))
        square = products[j][j]
        is_against = (along < 0) & torch.isfinite(square)
        weights[j] = weights[j] - torch.where(is_against, along / torch.where(square > 0, square, 1), 0)
    return weights


def _multiply(one: Gradients, other: Gradients) -> Tensor:
    """The real part of ⟨one, other⟩ over all parameters, without dimensions, float32 or wider."""
    parts = [_multiply_tensors(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return add_up(parts) if parts else torch.zeros(())


def _multiply_tensors(a: Tensor, b: Tensor) -> Tensor:
    a, b = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (a, b))
    return ((a * b.conj()).real if a.is_complex() else a * b).sum()


def _add_up(tensors: Gradients, weights: Sequence[Tensor | float]) -> Tensor | None:
    terms = [
        (tensor * (weight.to(tensor.device) if isinstance(weight, Tensor) else weight)).to(tensor.dtype)
        for tensor, weight in zip(tensors, weights, strict=True)
        if tensor is not None
    ]
    return functools.reduce(torch.add, terms) if terms else None
