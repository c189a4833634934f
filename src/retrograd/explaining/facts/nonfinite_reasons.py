"""Why an operation makes a number that is not finite of finite ones, and why a node makes such a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrograd.core.hooks.dispatch import carry_out_unseen

MEAN = 1
"""The reduction ``mean``, as nodes save it."""


UNNAMED_LEAF = "in a tensor that requires grad and that no recorded model holds"
"""Reason where that is not finite: a parameter that its gradient or update spoilt, or an input; not known which."""


@dataclass(frozen=True, slots=True)
class Case:
    """An operation, as it was called.

    Attributes:
        name: of the function, without the underscore of one that writes in place.
        operands: its tensors.
        result: what it made; None where that is not there any more.
        numbers: its arguments that are plain numbers, in order.
        named: its arguments that were named, and all that are known of a node.
        is_whole: ``operands`` are all the tensors that it took.
    """

    name: str
    operands: Sequence[Tensor] = ()
    result: Tensor | None = None
    numbers: Sequence[float] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = True

    @property
    def first(self) -> Tensor | None:
        """The first operand, where it has real values."""
        return next((each for each in self.operands[:1] if each.is_floating_point() or not each.is_complex()), None)

    @property
    def second(self) -> Tensor | float | None:
        """The second one, which may be a number."""
        return self.operands[1] if len(self.operands) > 1 else self.numbers[0] if self.numbers else None

    @property
    def dims(self) -> list[int]:
        """Along which dimensions it works; all where none is given."""
        given = self.named.get("dim", self.numbers[0] if self.numbers else None)
        rank = 0 if self.first is None else self.first.ndim
        listed = [given] if isinstance(given, int) else list(given or range(rank))
        return [int(each) % max(rank, 1) for each in listed]


def find_reason(case: Case) -> str:
    """In words: ``log of 0``; empty where what it took does not tell the reason."""
    rule = _RULES.get(case.name)
    reason = rule(case) if rule is not None and case.first is not None else ""
    return reason or _find_infinite(case) or _find_overflow(case)


def describe_values(tensor: Tensor) -> str:
    """Describe the values of a tensor: ``min 0, max 3, 2 of 40 are 0``."""
    values = tensor.detach()
    if values.is_complex() or not values.numel():
        return f"{values.numel()} elements"
    values = values.double() if values.is_floating_point() else values.to(torch.float64)
    finite = values[values.isfinite()]
    parts = [f"min {finite.min():.4g}, max {finite.max():.4g}"] if len(finite) else []
    counts = {"0": values == 0, "NaN": values.isnan(), "−inf": values == -torch.inf, "inf": values == torch.inf}
    parts += [f"{int(where.sum())} of {values.numel()} are {what}" for what, where in counts.items() if where.any()]
    return ", ".join(parts)


# ---- rules ----


def _any(where: Tensor | bool) -> bool:
    return bool(where.any()) if isinstance(where, Tensor) else where


def _log(case: Case) -> str:
    x = case.operands[0]
    edge = -1 if case.name == "log1p" else 0
    if _any(x == edge):
        return f"{case.name} of {edge}"
    return f"{case.name} of a number below {edge}" if _any(x < edge) else ""


def _root(case: Case) -> str:
    x = case.operands[0]
    if _any(x < 0):
        return f"{case.name} of a negative number"
    return f"{case.name} of 0" if case.name == "rsqrt" and _any(x == 0) else ""


def _divide(case: Case) -> str:
    over = case.operands[0] if case.name in ("reciprocal", "rdiv", "rtruediv") else case.second
    above: Any = 1 if over is case.operands[0] else case.operands[0]
    if over is None or not _any(over == 0):
        return ""
    return "0 / 0" if _any((over == 0) & (above == 0)) else "division by 0"


def _power(case: Case) -> str:
    base, exponent = case.operands[0], case.second
    if case.name == "rpow":
        base, exponent = case.second, case.operands[0]  # type: ignore[assignment]
    if base is None or exponent is None:
        return ""
    if _any((base == 0) & (exponent < 0)):
        return "0 to a negative power"
    rounded = exponent.round() if isinstance(exponent, Tensor) else float(round(exponent))
    return "negative base with a fractional exponent" if _any((base < 0) & (exponent != rounded)) else ""


def _exponential(case: Case) -> str:
    x = case.operands[0].detach()
    largest = x[x.isfinite()].abs() if case.name in ("sinh", "cosh") else x[x.isfinite()]
    if not largest.numel() or not x.is_floating_point():
        return ""
    largest = largest.max().double()
    is_too_large = float(getattr(torch, case.name)(largest)) > torch.finfo(x.dtype).max
    return f"{case.name} of {float(largest):.4g}, which is too large for {_kind(x)}" if is_too_large else ""


def _soft(case: Case) -> str:
    x, dims = case.operands[0].detach(), case.dims or [-1]
    if _any((x == -torch.inf).all(dims[0] if x.ndim else 0)):
        return f"{case.name} over a row that is all −inf"
    return f"{case.name} of inf" if _any(x == torch.inf) else ""


def _spread(case: Case) -> str:
    x = case.operands[0]
    count = math.prod(x.shape[dim] for dim in case.dims) if x.ndim else 1
    plain = case.name.removesuffix("_mean")
    return f"{plain} of one element" if count == 1 else f"{plain} of no elements" if count == 0 else ""


def _average(case: Case) -> str:
    return "mean over no elements" if case.operands[0].numel() == 0 else ""


def _beyond_one(case: Case) -> str:
    x = case.operands[0].detach().abs()
    is_open = case.name in ("atanh", "arctanh")
    return (
        f"{case.name} of a number {'at or ' if is_open else ''}beyond ±1" if _any(x >= 1 if is_open else x > 1) else ""
    )


def _below_one(case: Case) -> str:
    return f"{case.name} of a number below 1" if _any(case.operands[0] < 1) else ""


def _classify(case: Case) -> str:
    scores, target = case.operands[0].detach(), case.operands[1] if len(case.operands) > 1 else None
    if target is None or target.is_floating_point() or scores.ndim != target.ndim + 1:
        return ""
    kept = target != case.named.get("ignore_index", -100)
    if not _any(kept):
        is_mean = case.named.get("reduction", "mean") in ("mean", MEAN)
        return "every target is ignored, so it is the mean over none" if is_mean else ""
    classes = min(scores.ndim - 1, 1)
    chosen = scores.gather(classes, target.where(kept, 0).unsqueeze(classes)).squeeze(classes)
    what = "logit" if case.name == "cross_entropy" else "log-probability"
    return f"a target is a class whose {what} is −inf" if _any((chosen == -torch.inf) & kept) else ""


def _align(case: Case) -> str:
    """A target needs a frame for each label, and one more between two that are the same."""
    named, given = case.named, list(case.operands[1:4])
    targets, frames, labels = (
        torch.as_tensor(named[name]) if name in named else given.pop(0) if given else None
        for name in ("targets", "input_lengths", "target_lengths")
    )
    if targets is None or frames is None or labels is None:
        return ""
    rows = targets if targets.ndim == 2 else targets.split(labels.tolist()) if labels.ndim else (targets,)
    for row, count, length in zip(rows, frames.reshape(-1).tolist(), labels.reshape(-1).tolist(), strict=False):
        label = row[:length]
        needed = length + int((label[1:] == label[:-1]).sum())
        if needed > count:
            return f"ctc_loss of a target that needs {needed} frames, of which there are {count}"
    return ""


def _attend(case: Case) -> str:
    masks = [mask for mask in (case.named.get("attn_mask"), case.named.get("key_padding_mask")) if mask is not None]
    for mask in masks:
        is_float = mask.is_floating_point()
        hides = mask == -torch.inf if is_float else ~mask if case.name.startswith("scaled") else mask
        if _any(hides.all(-1)):
            return "softmax over a row that is all −inf: the mask hides all keys"
    return ""


def _normalise(case: Case) -> str:
    return "division by a standard deviation of 0, for eps is 0" if case.named.get("eps") == 0 else ""


_Rule = Callable[[Case], str]

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("log", "log2", "log10", "log1p"), _log),
    **dict.fromkeys(("sqrt", "rsqrt"), _root),
    **dict.fromkeys(("div", "true_divide", "divide", "rdiv", "rtruediv", "reciprocal", "__rdiv__"), _divide),
    **dict.fromkeys(("pow", "rpow", "float_power"), _power),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh"), _exponential),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), _soft),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), _spread),
    "mean": _average,
    **dict.fromkeys(("acos", "asin", "arccos", "arcsin", "atanh", "arctanh"), _beyond_one),
    **dict.fromkeys(("acosh", "arccosh"), _below_one),
    **dict.fromkeys(("cross_entropy", "nll_loss", "nll_loss2_d", "nll_loss_nd"), _classify),
    "ctc_loss": _align,
    **dict.fromkeys(("scaled_dot_product_attention", "multi_head_attention_forward"), _attend),
    **dict.fromkeys(("batch_norm", "layer_norm", "group_norm", "instance_norm"), _normalise),
}


_LINEAR = frozenset(
    {"add", "sub", "rsub", "mul", "square", "sum", "mean", "cumsum", "prod", "cumprod", "matmul", "rmatmul", "mm",
     "bmm", "mv", "dot", "addmm", "baddbmm", "addcmul", "linear", "bilinear", "einsum", "conv1d", "conv2d", "conv3d",
     "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "mse_loss", "l1_loss", "float", "half", "bfloat16",
     "to", "to_copy", "type_as", "radd", "rmul", "__add__", "__sub__", "__mul__", "__matmul__", "__iadd__", "__isub__",
     "__imul__", "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "dist", "cdist", "lerp"}
)  # fmt: skip
"""Sums, products and copies: of finite numbers they make what is not finite by an overflow, and in no other way."""


def _find_infinite(case: Case) -> str:
    """Infinity, or a number that is NaN, among what it took: what comes of it is none of its own."""
    number = next((each for each in case.numbers if not math.isfinite(each)), None)
    if number is not None:
        return f"{case.name} with {number:g}"
    bad = [each for each in case.operands if each.is_floating_point() and _any(each.detach().isinf())]
    if not bad:
        return ""
    sign = "−inf" if not any(_any(each == torch.inf) for each in bad) else "inf"
    other = next((each for each in case.operands[:2] if each is not bad[0]), None)
    is_zeroed = case.name in ("mul", "rmul", "__mul__") and other is not None and _any(other == 0)
    return f"0 · {sign}" if is_zeroed else f"{case.name} of {sign}"


def _find_overflow(case: Case) -> str:
    """An operation that makes nothing else of finite numbers."""
    kind = case.result if case.result is not None else case.first
    is_finite = case.is_whole and all(_any(each.detach().isfinite().all()) for each in case.operands)
    if kind is None or not case.operands or not kind.is_floating_point() or case.name not in _LINEAR or not is_finite:
        return ""
    is_empty = case.name == "mean" and not case.operands[0].numel()
    return "" if is_empty else f"overflow of {_kind(kind)}, whose largest is {torch.finfo(kind.dtype).max:g}"


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ---- gradients ----

SavedValues = Mapping[str, Any]


def operation_of(node: str) -> str:
    """The function that a class of nodes belongs to: ``sqrt`` of ``SqrtBackward0``."""
    plain = node.rstrip("0123456789").removesuffix("Backward")
    return "".join(f"_{each.lower()}" if each.isupper() and place else each.lower() for place, each in enumerate(plain))


def find_gradient_reason(node: str, saved: SavedValues) -> str:
    """In words: ``the derivative of sqrt is infinite at 0``; empty where no reason is known."""
    rule = _NODE_RULES.get(node.rstrip("0123456789"))
    return carry_out_unseen(partial(rule, saved)) if rule is not None else ""


def _at(slot: str, point: float, text: str) -> Callable[[SavedValues], str]:
    def say(saved: SavedValues) -> str:
        value = saved.get(slot)
        return text if isinstance(value, Tensor) and _any(value == point) else ""

    return say


def _root_saved(saved: SavedValues) -> str:
    result = saved.get("result")
    if not isinstance(result, Tensor):
        return ""
    if _any(result.isnan()):
        return "the derivative is NaN too for sqrt of a negative number, or of NaN"
    return "the derivative of sqrt is infinite at 0" if _any(result == 0) else ""


def _power_saved(saved: SavedValues) -> str:
    base, exponent = saved.get("self"), saved.get("exponent")
    if not isinstance(base, Tensor) or exponent is None or not _any((base == 0) & _below(exponent, 1)):
        return ""
    return "the derivative of a power below 1 is infinite at 0"


def _below(exponent: Any, bound: float) -> Any:
    return exponent < bound if isinstance(exponent, Tensor) else torch.tensor(float(exponent) < bound)


def _beyond(saved: SavedValues) -> str:
    value = saved.get("self")
    is_there = isinstance(value, Tensor) and _any(value.abs() >= 1)
    return "the derivative of an inverse sine or cosine is infinite at ±1" if is_there else ""


def _times(saved: SavedValues) -> str:
    values = [each for each in (saved.get("self"), saved.get("other")) if isinstance(each, Tensor)]
    return "a factor of a product is not finite" if any(not _any(each.isfinite().all()) for each in values) else ""


_NODE_RULES: dict[str, Callable[[SavedValues], str]] = {
    "SqrtBackward": _root_saved,
    "RsqrtBackward": _at("result", torch.inf, "the derivative of rsqrt is infinite at 0"),
    "ReciprocalBackward": _at("result", torch.inf, "the derivative of 1/x is infinite at 0"),
    "LogBackward": _at("self", 0, "the derivative of log is infinite at 0"),
    "Log2Backward": _at("self", 0, "the derivative of log2 is infinite at 0"),
    "Log10Backward": _at("self", 0, "the derivative of log10 is infinite at 0"),
    "Log1PBackward": _at("self", -1, "the derivative of log1p is infinite at −1"),
    "ExpBackward": _at("result", torch.inf, "exp has overflowed"),
    "LogsumexpBackward": _at("result", -torch.inf, "logsumexp over a row that is all −inf"),
    "PowBackward": _power_saved,
    "DivBackward": _at("other", 0, "division by 0"),
    "AcosBackward": _beyond,
    "AsinBackward": _beyond,
    "AtanhBackward": _beyond,
    "MulBackward": _times,
}
