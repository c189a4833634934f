"""The published rules once more, in plain Python and float64, from the papers and their released code.

Each takes a list of norms (or of arrays) and returns what is left of them. What is not finite is passed by, as our
rules do and the released code does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class Average:
    """An exponential moving average that is corrected for having begun with nothing, or begins at a value."""

    def __init__(self, decay: float) -> None:
        self.decay, self.total, self.weight = decay, 0.0, 0.0

    def start(self, value: float) -> None:
        self.total, self.weight = value, 1.0

    def add(self, value: float) -> None:
        self.total = self.decay * self.total + (1 - self.decay) * value
        self.weight = self.decay * self.weight + 1 - self.decay

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan


def clip(norm: float, limit: float) -> float:
    return min(norm, limit)


def auto_clip(norms: Sequence[float], percentile: float = 10.0, size: int | None = None) -> list[float]:
    past: list[float] = []
    clipped = []
    for norm in norms:
        if math.isfinite(norm):
            past.append(norm)
        seen = past if size is None else past[-size:]
        clipped.append(clip(norm, float(np.percentile(seen, percentile))) if seen and math.isfinite(norm) else norm)
    return clipped


def zclip(
    norms: Sequence[float],
    alpha: float = 0.97,
    threshold: float = 2.5,
    cap: float | None = 1.0,
    warmup: int = 25,
    option: str = "adaptive_scaling",
    factor: float = 1.0,
) -> list[float]:
    clipped, first = [], []
    mean, variance = Average(alpha), Average(alpha)
    for step, norm in enumerate(norms):
        limit = math.inf
        if not math.isfinite(norm):
            clipped.append(norm)
            continue
        if step < warmup:
            first.append(norm)
            mean.start(float(np.mean(first)))
            variance.start(float(np.var(first)))
        else:
            z = (norm - mean.value) / (math.sqrt(variance.value) + 1e-6)
            if z > threshold:
                limit = mean.value
                if option == "adaptive_scaling":
                    limit = factor * (mean.value + threshold * math.sqrt(variance.value) / (z / threshold))
            learnt = min(norm, limit)
            mean.add(learnt)
            variance.add((learnt - mean.value) ** 2)
        clipped.append(clip(norm, limit if cap is None else min(limit, cap)))
    return clipped


def adagc(
    norms: Sequence[float], beta: float = 0.98, relative: float = 1.05, absolute: float = 1.0, warmup: int = 100
) -> list[float]:
    clipped, gamma = [], Average(beta)
    for step, norm in enumerate(norms, 1):
        if not math.isfinite(norm):
            clipped.append(norm)
            continue
        if step < warmup:
            norm = norm * min(absolute / norm, 1.0)
            gamma.start(norm if math.isnan(gamma.value) else min(gamma.value, norm))
        else:
            if gamma.weight:
                norm = norm * min(relative * gamma.value / norm, 1.0)
            gamma.add(norm)
        clipped.append(norm)
    return clipped


def ema_clip(norms: Sequence[float], gamma1: float = 0.7, gamma2: float = 0.9, eps: float = 1e-8) -> list[float]:
    clipped, m, v, t = [], 0.0, 0.0, 0
    for norm in norms:
        if not math.isfinite(norm) or norm == 0:
            clipped.append(norm)
            continue
        t += 1
        m = gamma1 * m + (1 - gamma1) * norm
        v = gamma2 * v + (1 - gamma2) * norm**2
        clipped.append(m / (1 - gamma1**t) / (math.sqrt(v / (1 - gamma2**t)) + eps))
    return clipped


def skip_step(norms: Sequence[float], sigma: float = 6.0, size: int = 128) -> list[bool]:
    """Which are skipped."""
    past: list[float] = []
    skipped = []
    for norm in norms:
        if not math.isfinite(norm):
            skipped.append(True)
            continue
        last = past[-size:]
        is_known = len(last) + 1 >= max(2, size // 2) and len(last) > 1
        skipped.append(is_known and norm - np.mean(last) > sigma * np.std(last, ddof=1))
        past.append(norm)
    return skipped


def spike_clip(
    gradients: Sequence[np.ndarray],
    threshold: float = 5000.0,
    beta: float = 0.999,
    reset_every: int | None = 500,
    rest: int = 20,
) -> list[np.ndarray]:
    clipped, v = [], np.zeros_like(gradients[0])
    for step, gradient in enumerate(gradients, 1):
        g = gradient.copy()
        if reset_every and step % reset_every == 0:
            v = np.zeros_like(g)
        if step >= rest and (not reset_every or step % reset_every >= rest):
            mask = np.isfinite(g) & (v > 0) & (g**2 > threshold * v)
            g[mask] = np.sign(g[mask]) * np.sqrt(threshold * v[mask])
        finite = np.isfinite(g)
        v[finite] = beta * v[finite] + (1 - beta) * g[finite] ** 2
        clipped.append(g)
    return clipped


def peak_clip(gradients: Sequence[np.ndarray], theta: float = 0.999) -> list[np.ndarray]:
    clipped, average = [], 0.0
    for step, gradient in enumerate(gradients, 1):
        g = gradient.copy()
        finite = np.isfinite(g)
        peak = float(np.abs(g[finite]).max(initial=0.0))
        average = theta * average + (1 - theta) * peak
        limit = average / (1 - theta**step)
        mask = finite & (np.abs(g) > limit * (1 + 1e-14))
        g[mask] = g[mask] / peak * limit
        clipped.append(g)
    return clipped


def grokfast(gradients: Sequence[np.ndarray], alpha: float = 0.98, weight: float = 2.0) -> list[np.ndarray]:
    slow = gradients[0]
    amplified = []
    for gradient in gradients:
        slow = alpha * slow + (1 - alpha) * gradient
        amplified.append(gradient + weight * slow)
    return amplified


def pcgrad(gradients: Sequence[np.ndarray], orders: Sequence[Sequence[int]]) -> np.ndarray:
    """The sum of the projected vectors, for a given order of the others for each."""
    total = np.zeros_like(gradients[0])
    for i, order in enumerate(orders):
        projected = gradients[i].copy()
        for j in order:
            along = projected @ gradients[j]
            if along < 0:
                projected = projected - along / (gradients[j] @ gradients[j]) * gradients[j]
        total += projected
    return total


def agc(weight: np.ndarray, gradient: np.ndarray, clip: float = 0.01, eps: float = 1e-3) -> np.ndarray:
    """A row at a time."""
    if gradient.ndim < 2:
        weight, gradient = weight.reshape(1, -1), gradient.reshape(1, -1)
    clipped = gradient.copy()
    for row in range(len(gradient)):
        limit = clip * max(float(np.linalg.norm(weight[row])), eps)
        norm = float(np.linalg.norm(gradient[row]))
        if norm > limit:
            clipped[row] = gradient[row] * limit / norm
    return clipped
