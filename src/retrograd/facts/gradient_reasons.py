"""Why a node has made a gradient that is not finite of such that are: in terms of what its operation had saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Saved = Mapping[str, Any]


def operation_of(node: str) -> str:
    """The function that a class of nodes belongs to: ``sqrt`` of ``SqrtBackward0``."""
    plain = node.rstrip("0123456789").removesuffix("Backward")
    return "".join(f"_{each.lower()}" if each.isupper() and place else each.lower() for place, each in enumerate(plain))


def find_gradient_reason(node: str, saved: Saved) -> str:
    """In words: ``the derivative of sqrt is infinite at 0``; empty where no reason is known."""
    rule = _RULES.get(node.rstrip("0123456789"))
    return rule(saved) if rule is not None else ""


def _any(where: Any) -> bool:
    return bool(where.any()) if isinstance(where, Tensor) else bool(where)


def _at(slot: str, point: float, text: str) -> Callable[[Saved], str]:
    def say(saved: Saved) -> str:
        value = saved.get(slot)
        return text if isinstance(value, Tensor) and _any(value == point) else ""

    return say


def _power(saved: Saved) -> str:
    base, exponent = saved.get("self"), saved.get("exponent")
    if not isinstance(base, Tensor) or exponent is None or not _any((base == 0) & _below(exponent, 1)):
        return ""
    return "the derivative of a power below 1 is infinite at 0"


def _below(exponent: Any, bound: float) -> Any:
    return exponent < bound if isinstance(exponent, Tensor) else torch.tensor(float(exponent) < bound)


def _divide(saved: Saved) -> str:
    other = saved.get("other")
    return "division by 0" if isinstance(other, Tensor) and _any(other == 0) else ""


def _beyond(saved: Saved) -> str:
    value = saved.get("self")
    is_there = isinstance(value, Tensor) and _any(value.abs() >= 1)
    return "the derivative of an inverse sine or cosine is infinite at ±1" if is_there else ""


def _times(saved: Saved) -> str:
    values = [each for each in (saved.get("self"), saved.get("other")) if isinstance(each, Tensor)]
    return "0 · inf: a factor is not finite" if any(not _any(each.isfinite().all()) for each in values) else ""


_RULES: dict[str, Callable[[Saved], str]] = {
    "SqrtBackward": _at("result", 0, "the derivative of sqrt is infinite at 0"),
    "RsqrtBackward": _at("result", torch.inf, "the derivative of rsqrt is infinite at 0"),
    "ReciprocalBackward": _at("result", torch.inf, "the derivative of 1/x is infinite at 0"),
    "StdBackward": _at("result", 0, "std has no derivative where all elements are equal"),
    "NormBackward": _at("result", 0, "the norm has no derivative at 0"),
    "LinalgVectorNormBackward": _at("result", 0, "the norm has no derivative at 0"),
    "LogBackward": _at("self", 0, "the derivative of log is infinite at 0"),
    "Log2Backward": _at("self", 0, "the derivative of log2 is infinite at 0"),
    "Log10Backward": _at("self", 0, "the derivative of log10 is infinite at 0"),
    "Log1PBackward": _at("self", -1, "the derivative of log1p is infinite at −1"),
    "ExpBackward": _at("result", torch.inf, "0 · inf: exp has overflowed where its result is not used"),
    "LogsumexpBackward": _at("result", -torch.inf, "logsumexp over a row that is all −inf"),
    "PowBackward": _power,
    "DivBackward": _divide,
    "AcosBackward": _beyond,
    "AsinBackward": _beyond,
    "AtanhBackward": _beyond,
    "MulBackward": _times,
}
