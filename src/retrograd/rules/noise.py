"""Random noise."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.norms import norm
from retrograd.rules.checks import Scheduled, at_step, check_scheduled, need_dense
from retrograd.rules.rule import Rule, SiteState, next_seed


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
