"""A Python Function against finite differences of its forward, in float64, on copies of what it was called with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograd.core.hooks.functions import FunctionClass
from retrograd.core.hooks.isolation import clone_wide, copy_nest, isolated_autograd
from retrograd.core.hooks.nested import flatten
from retrograd.core.randomness import Randomness, random_kept
from retrograd.explaining.probes.effects import leaves_something

_STEPS = (1e-5, 1e-6)
"""Distances of finite differences, of numbers of size one."""

_PROBES = 4
_SETTLED = 1e-4
"""By what part the differences at both distances may differ, where the function is smooth there."""

_AGREES = 1e-4
"""By what part backward may differ from them."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of the backward of a Function.

    Attributes:
        word: ``right``, ``straight-through`` (the forward does not change where backward gives a gradient),
            ``identity`` (the forward hands on what it gets, and backward changes the gradient), ``factor``,
            ``constant`` (backward gives the same, whatever it is given), ``other``, or ``not checked``.
        why: it was not checked.
        ratio: of the gradient to that of the forward, where it is always the same; else NaN.
        argument: which of the arguments it is.
        is_linear: the forward is linear in it.
    """

    word: str
    why: str = ""
    ratio: float = math.nan
    argument: int = 0
    is_linear: bool = False


def check_function(kind: FunctionClass, args: Sequence[Any]) -> Verdict:
    """Compare the backward of a Function with finite differences.

    Args:
        kind: the Function.
        args: what its forward was called with, without the context; tensors that want a gradient require grad.
    """
    why = _find_obstacle(kind, args)
    if why:
        return Verdict("not checked", why)
    try:
        with random_kept(), isolated_autograd():
            return _Comparison(kind, args).judge()
    except Exception as error:
        return Verdict("not checked", f"it raises in float64: {type(error).__name__}")


def _find_obstacle(kind: FunctionClass, args: Sequence[Any]) -> str:
    tensors = [each for each in args if isinstance(each, Tensor)]
    if not all(isinstance(each, (Tensor, *_PLAIN)) for each in args):
        return "an argument is neither a tensor nor a number"
    if any(
        each.is_complex()
        or each.is_sparse
        or each.is_nested
        or type(each).__torch_dispatch__ is not Tensor.__torch_dispatch__
        for each in tensors
    ):
        return "an argument is complex, sparse or of a class of its own"
    if sum(each.numel() for each in tensors) > _MOST:
        return "its arguments are too large"
    if any(leaves_something(getattr(kind, name)) for name in ("forward", "backward", "setup_context")):
        return "it may change what outlives its call"
    return ""


_MOST = 1 << 22


class _Comparison:
    """Runs of a Function in which one argument moves."""

    def __init__(self, kind: FunctionClass, args: Sequence[Any]) -> None:
        self._kind = kind
        self._args = list(copy_nest(list(args), clone_wide))
        self._wanted = [
            place
            for place, each in enumerate(args)
            if isinstance(each, Tensor) and each.requires_grad and each.is_floating_point()
        ]
        self._randomness = Randomness()
        self._draw = torch.Generator().manual_seed(0)

    def judge(self) -> Verdict:
        """Judge all arguments; the first that is wrong is told, unless the Function bends gradients on purpose."""
        before = torch.get_rng_state()
        outputs = self._run(self._args)
        if not torch.equal(before, torch.get_rng_state()):
            return Verdict("not checked", "it draws random numbers")
        if not outputs or not self._wanted:
            return Verdict("not checked", "no floating-point argument requires a gradient")
        found = [self._judge(place) for place in self._wanted]
        order = ("not checked", "straight-through", "identity", "other", "constant", "factor", "right")
        return min(found, key=lambda each: order.index(each.word))

    def _judge(self, place: int) -> Verdict:
        pairs = [self._compare(place) for _ in range(_PROBES)]
        if any(math.isnan(moved) or math.isnan(given) for moved, given, _ in pairs):
            return Verdict("not checked", "its derivative is not settled there")
        size = max(scale for _, _, scale in pairs)
        if all(abs(moved - given) <= _AGREES * max(abs(moved), abs(given), 1e-3 * size) for moved, given, _ in pairs):
            return Verdict("right", argument=place)
        if all(abs(moved) <= 1e-9 * size for moved, _, _ in pairs):
            return Verdict("straight-through", argument=place)
        if self._is_identity(place):
            return Verdict("identity", argument=place)
        ratios = [given / moved if moved else math.nan for moved, given, _ in pairs]
        is_same = max(ratios) - min(ratios) <= 1e-3 * max(map(abs, ratios))
        if is_same:
            return Verdict("factor", ratio=sum(ratios) / len(ratios), argument=place, is_linear=self._is_linear(place))
        word = "constant" if self._is_constant(place) else "other"
        return Verdict(word, argument=place, is_linear=self._is_linear(place))

    def _compare(self, place: int) -> tuple[float, float, float]:
        """⟨J v, u⟩ by differences (NaN where these do not settle), ⟨v, Jᵀ u⟩ by backward, and their size."""
        at = self._args[place]
        along = self._like(at)
        leaf = at.clone().requires_grad_()
        outputs = [each for each in self._run(self._with(place, leaf)) if each.requires_grad]
        weights = [self._like(each) for each in outputs]
        (gradient,) = torch.autograd.grad(outputs, [leaf], weights, allow_unused=True)
        given = 0.0 if gradient is None else float((gradient * along).sum())
        scale = max(1.0, float(at.abs().mean()))
        slopes = []
        for step in _STEPS:
            ends = [self._run(self._with(place, at + sign * step * scale * along)) for sign in (1, -1)]
            difference = sum(float(((up - down) * u).sum()) for up, down, u in zip(*ends, weights, strict=False))
            slopes.append(difference / (2 * step * scale))
        near, nearer = slopes
        size = max(abs(near), abs(given), *(float(each.detach().abs().sum()) for each in outputs[:1]))
        is_settled = abs(near - nearer) <= _SETTLED * max(abs(near), abs(nearer)) + 1e-8 * size
        return (nearer if is_settled else math.nan), given, size

    def _is_constant(self, place: int) -> bool:
        """Return whether backward gives the same for any gradients of outputs with several elements."""
        leaf = self._args[place].clone().requires_grad_()
        outputs = [each for each in self._run(self._with(place, leaf)) if each.requires_grad]
        if all(each.numel() == 1 for each in outputs):
            return False  # a loss, which is given 1
        given = [torch.autograd.grad(outputs, [leaf], [self._like(each) for each in outputs], True) for _ in range(2)]
        return bool(given[0][0].any()) and torch.equal(given[0][0], given[1][0])

    def _is_identity(self, place: int) -> bool:
        outputs = self._run(self._args)
        return (
            len(outputs) == 1
            and outputs[0].numel() == self._args[place].numel()
            and torch.equal(outputs[0].flatten(), self._args[place].flatten())
        )

    def _is_linear(self, place: int) -> bool:
        """Return whether f(x + 2 v) − f(x) is twice f(x + v) − f(x)."""
        along = self._like(self._args[place])
        at, once, twice = (self._run(self._with(place, self._args[place] + far * along)) for far in (0, 1, 2))
        return all(
            torch.allclose(c - a, 2 * (b - a), rtol=1e-7, atol=1e-9) for a, b, c in zip(at, once, twice, strict=True)
        )

    def _with(self, place: int, tensor: Tensor) -> list[Any]:
        return [tensor if number == place else each for number, each in enumerate(self._args)]

    def _like(self, tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=self._draw, dtype=torch.float64).to(tensor.device)

    def _run(self, args: Sequence[Any]) -> list[Tensor]:
        self._randomness.restore()
        given = [each.clone() if isinstance(each, Tensor) else each for each in args]
        with torch.enable_grad():
            found = self._kind.apply(*given)
        return [each for _, each in flatten(found, ()) if each.is_floating_point()]
