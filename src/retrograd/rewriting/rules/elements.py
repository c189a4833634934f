"""Rules that change elements: scaled, bounded, left out, replaced, centred, with noise, with their own average."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from retrograd.core.errors import RuleError
from retrograd.core.norms import norm
from retrograd.rewriting.rules.checks import (
    BELOW_ONE,
    Scheduled,
    at_step,
    check_number,
    check_scheduled,
    need_dense,
    need_real,
    need_shape,
)
from retrograd.rewriting.rules.rule import Rule, SiteState, next_seed
from retrograd.rewriting.rules.sparse import is_sparse, on_values


class Scale(Rule):
    """Multiply: x ← a · x.

    Args:
        factor: a, or a function from the step to it.
    """

    is_elementwise: ClassVar[bool] = True

    def __init__(self, factor: Scheduled) -> None:
        super().__init__()
        check_scheduled(self, "factor", factor)
        self.factor = factor

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        factor = at_step(self.factor, state.step)
        return on_values(value, lambda values: values * factor)


class Reverse(Rule):
    """Turn a gradient round: g ← −λ · g, the gradient reversal layer of domain adaptation.

    Source: Ganin & Lempitsky 2015, arXiv 1409.7495, who let λ rise from 0 to 1 by 2 / (1 + exp(−10 p)) − 1, where p is
    the share of the training that is over.

    Args:
        weight: λ, or a function from the step to it.
    """

    is_elementwise: ClassVar[bool] = True

    def __init__(self, weight: Scheduled = 1.0) -> None:
        super().__init__()
        check_scheduled(self, "weight", weight)
        self.weight = weight

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        factor = -at_step(self.weight, state.step)
        return on_values(value, lambda values: values * factor)


class Clamp(Rule):
    """Keep elements between two bounds: x ← min(max(x, low), high). Infinities are bounded too; NaN stays.

    On a value, the backward pass of the clamp follows: no gradient flows where a bound was met.

    Args:
        low: lower bound; None for none.
        high: upper bound; None for none.

    Raises:
        RuleError: for no bound at all, or a lower one above the upper.
    """

    is_elementwise: ClassVar[bool] = True

    def __init__(self, low: float | None = None, high: float | None = None) -> None:
        super().__init__()
        if low is None and high is None:
            raise RuleError("Clamp() bounds nothing.", repair="give `low`, `high` or both.")
        if low is not None and high is not None and not low <= high:
            raise RuleError(f"Clamp({low!r}, {high!r}) leaves no number over.", repair="give the lower bound first.")
        self.low = low
        self.high = high

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_real(self, value)
        return value.clamp(self.low, self.high)


class ClipValue(Rule):
    """Bound the magnitude of each element: g ← min(max(g, −c), c), as ``torch.nn.utils.clip_grad_value_``.

    Args:
        limit: c, from 0 on.
    """

    is_elementwise: ClassVar[bool] = True

    def __init__(self, limit: float) -> None:
        super().__init__()
        check_number(self, "limit", limit)
        self.limit = limit

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        if not is_sparse(value):
            need_real(self, value)
        return on_values(value, lambda values: values.clamp(-self.limit, self.limit))


class KeepSign(Rule):
    """Keep positive elements and put zeros in place of negative ones: g ← max(g, 0); NaN stays.

    On the gradient of the output of every ReLU this is guided backpropagation, R = 1[f > 0] · 1[R' > 0] · R': the rule
    makes the second factor, and the backward pass of the ReLU, through which the gradient flows next, the first.

    Source: Springenberg, Dosovitskiy, Brox & Riedmiller 2015, arXiv 1412.6806.

    Args:
        positive: False keeps the negative elements instead.
    """

    is_elementwise: ClassVar[bool] = True

    def __init__(self, *, positive: bool = True) -> None:
        super().__init__()
        self.positive = positive

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_real(self, value)
        return value.clamp(min=0) if self.positive else value.clamp(max=0)


class Zero(Rule):
    """Put zeros in place of everything, NaN too: x ← 0. On a gradient, nothing flows on from here."""

    is_elementwise: ClassVar[bool] = True

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        return torch.zeros_like(value)


class Mask(Rule):
    """Keep some elements and put zeros in place of the others, whatever these hold: x ← x where m, else 0.

    Args:
        mask: m, bool, of the shape of the tensor or one that broadcasts to it. It is moved to the tensor's device at
            every call, so give it there.

    Raises:
        RuleError: for a mask that is not a tensor of bools.
    """

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise RuleError(
                f"Mask: {type(mask).__name__ if not isinstance(mask, Tensor) else mask.dtype} is not a mask.",
                repair="give a tensor of bools, True where an element is kept.",
            )
        self.mask = mask.detach()

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_dense(self, value)
        kept = torch.where(self.mask.to(value.device), value, 0)
        if kept.shape != value.shape:
            raise RuleError(
                f"Mask: a mask of shape {tuple(self.mask.shape)} does not fit a tensor of shape {tuple(value.shape)}.",
                repair="give a mask that broadcasts to the tensor.",
            )
        return kept


class Replace(Rule):
    """Put a tensor or a number in place of everything: x ← r. No gradient flows on from a value that is replaced.

    Args:
        replacement: r; a tensor has the shape of the one it takes the place of, or broadcasts to it, and is converted
            to its type and device.
    """

    def __init__(self, replacement: Tensor | float) -> None:
        super().__init__()
        if not isinstance(replacement, Tensor):
            check_number(self, "replacement", replacement, low=-float("inf"))
        self.replacement = replacement.detach() if isinstance(replacement, Tensor) else replacement

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_dense(self, value)
        if not isinstance(self.replacement, Tensor):
            return torch.full_like(value, self.replacement)
        wanted = self.replacement.to(device=value.device, dtype=value.dtype)
        need_shape(self, value, torch.broadcast_shapes(wanted.shape, value.shape))
        return wanted.expand_as(value).clone()  # others may write into what a rule returns


class Centralise(Rule):
    """Subtract the mean over all dimensions but the first: gᵢ ← gᵢ − mean(gᵢ), for each output i of a weight.

    Meant for the gradients of weights of linear layers and convolutions. A tensor of fewer than two dimensions, such
    as a bias, is left as it is.

    Source: Yong, Huang, Hua & Zhang 2020, *Gradient Centralization*, arXiv 2004.01461, equation 1.
    """

    def __call__(self, value: Tensor, state: SiteState) -> Tensor | None:
        need_dense(self, value)
        return None if value.ndim < 2 else value - value.mean(dim=tuple(range(1, value.ndim)), keepdim=True)


class Noise(Rule):
    """Add normal noise: x ← x + σ ε, or x ← x + σ · rms(x) · ε with ``relative``; ε standard normal.

    The noise comes from a generator of its own: torch's random state stays as it is, the same seed gives the same
    noise, and all ranks of a distributed run draw alike, as gradients of replicated parameters must. The rms is that
    of the finite elements, and no derivative is taken of it. Of complex noise E|ε|² = 1.

    Source: Neelakantan et al. 2015, arXiv 1511.06807, who let σ² = η / (1 + t)^0.55 fall over steps t, with η from
    0.01, 0.3 and 1.

    Args:
        std: σ, or a function from the step to it.
        relative: whether σ is a share of the root mean square of the tensor.
        seed: what the noise is drawn from, together with the site and the number of the draw.
    """

    def __init__(self, std: Scheduled, *, relative: bool = False, seed: int = 0) -> None:
        super().__init__()
        check_scheduled(self, "std", std, low=0.0)
        self.std = std
        self.relative = relative
        self.seed = seed

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_dense(self, value)
        generator = torch.Generator(value.device).manual_seed(next_seed(self.seed, state))
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device)
        std = at_step(self.std, state.step)
        scaled = noise * (std * _measure_rms(value.detach()) if self.relative else std)
        return value + scaled.to(value.dtype)


def _measure_rms(value: Tensor) -> Tensor:
    """Root mean square of the finite elements, without dimensions; float32 for narrower types."""
    finite = torch.isfinite(value)
    magnitudes = torch.where(finite, value, 0).abs()
    return norm(magnitudes) / finite.sum().clamp(min=1).sqrt()


class Grokfast(Rule):
    """Add a multiple of the gradient's own moving average: m ← α m + (1 − α) g from m = g₁, then g ← g + λ m.

    An element that is not finite stays as it is and is not averaged.

    Source: Lee, Kang, Kim & Lee 2024, arXiv 2405.20233, Grokfast-EMA.

    Args:
        alpha: α, from 0 to below 1.
        weight: λ.
    """

    is_elementwise: ClassVar[bool] = True

    def __init__(self, alpha: float = 0.98, weight: float = 2.0) -> None:
        super().__init__()
        check_number(self, "alpha", alpha, high=BELOW_ONE)
        check_number(self, "weight", weight, low=-float("inf"))
        self.alpha = alpha
        self.weight = weight

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_dense(self, value)
        slow = state.ema("gradient", self.alpha)
        if slow.is_new:
            slow.start(value)
        slow.add(value)
        return value + (self.weight * slow.value).to(value.dtype)
