"""All known points without a derivative; a test holds each row against torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nan
from typing import Any

import torch

from retrograd.explaining.kinks import finding_points as at
from retrograd.explaining.kinks.point import Convention, Point

GRADIENT, SUBGRADIENT, SUPERGRADIENT, LIMIT, ARBITRARY, ZERO, ONE_SIDE, NONE_OF_THEM = Convention

_CLAMP_MIN, _CLAMP_MAX = ("clamp", "clamp_min"), ("clamp", "clamp_max")
_NORM = ("linalg_vector_norm", "norm")
_POOLS = ("max_pool2d_with_indices", "max_pool3d_with_indices")
_ADAPTIVE = ("adaptive_max_pool2d", "adaptive_max_pool3d")
_TIES = "1/n to each of n ties"
_FIRST = "all to the first of the ties"


def _has_order(*orders: float) -> Any:
    return lambda given: given.get("ord", given.get("p")) in orders


def _is_smooth_order(given: Mapping[str, Any]) -> bool:
    order = given.get("ord", given.get("p"))
    return order is None or 1 < order < inf


def _left_slope(given: Mapping[str, Any]) -> float:
    return float(given["alpha"] * given["input_scale"])


def _is_whole_tensor(given: Mapping[str, Any]) -> bool:
    return "dim" not in given


def _is_steep(given: Mapping[str, Any]) -> Any:
    return given["self"].eq(0) & (given["weight"] > 1)


def _is_flat(given: Mapping[str, Any]) -> Any:
    return given["self"].eq(0) & (given["weight"] <= 1)


def _is_at_number(bound: str) -> Any:
    return at.only_if(lambda given: not isinstance(given[bound], torch.Tensor), at.equal_to(bound))


def _is_at_tensor(bound: str, other: str) -> Any:
    """At one bound, and not at both: then all goes to the argument itself."""

    def find(given: Mapping[str, Any]) -> Any:
        here, there = given[bound], given.get(other)
        if not isinstance(here, torch.Tensor):
            return torch.zeros_like(given["self"], dtype=torch.bool)
        return given["self"].eq(here) & (True if there is None else given["self"].ne(there))

    return find


_CHANGED = (2, 14)
"""The torch in which clamping came to share ties, and to give 0 at bounds that are numbers."""

ALL_POINTS: tuple[Point, ...] = (
    # rectifiers and their kin
    Point("relu", "at 0", SUBGRADIENT, "0", "F.relu(x)", (0,), (0,), at.equal(0), is_usual=True),
    Point("leaky_relu", "at 0", SUBGRADIENT, "the negative slope", "F.leaky_relu(x)", (0,), (0.01,),
          at.only_if(lambda given: given["negative_slope"] <= 1, at.equal(0)), is_usual=True),
    Point("leaky_relu", "at 0, with a negative slope above 1", ONE_SIDE, "the negative slope",
          "F.leaky_relu(x, 2.0)", (0,), (2,),
          at.only_if(lambda given: given["negative_slope"] > 1, at.equal(0)), is_usual=True),
    Point("rrelu", "at 0", SUBGRADIENT, "the negative slope", "F.rrelu(x)", (0,), ((1 / 8 + 1 / 3) / 2,),
          at.equal(0), ("rrelu_with_noise",), is_usual=True),
    Point("prelu", "at 0", SUBGRADIENT, "the weight", "F.prelu(x, x.new_tensor([0.25]))", (0,), (0.25,),
          _is_flat, ("_prelu_kernel",), is_usual=True),
    Point("prelu", "at 0, with a weight above 1", ONE_SIDE, "the weight", "F.prelu(x, x.new_tensor([2.0]))",
          (0,), (2,), _is_steep, ("_prelu_kernel",), is_usual=True),
    Point("threshold", "at the threshold", LIMIT, "0", "F.threshold(x, 1.0, 0.0)", (1,), (0,),
          at.equal_to("threshold"), is_usual=True),
    Point("hardtanh", "at its minimum", SUBGRADIENT, "0", "F.hardtanh(x)", (-1,), (0,),
          at.equal_to("min_val"), is_usual=True),
    Point("hardtanh", "at its maximum", SUPERGRADIENT, "0", "F.hardtanh(x)", (1,), (0,), at.equal_to("max_val")),
    Point("relu6", "at 6", SUPERGRADIENT, "0", "F.relu6(x)", (6,), (0,)),
    Point("clamp", "at the minimum", SUBGRADIENT, "0", "x.clamp(min=0)", (0,), (0,), _is_at_number("min"),
          _CLAMP_MIN, is_usual=True, since=_CHANGED),
    Point("clamp", "at the maximum", SUPERGRADIENT, "0", "x.clamp(max=1)", (1,), (0,), _is_at_number("max"),
          _CLAMP_MAX, is_usual=True, since=_CHANGED),
    Point("clamp", "at a minimum that is a tensor", SUBGRADIENT, "1/2 to each", "torch.clamp(x[0], min=x[1])",
          (0, 0), (0.5, 0.5), _is_at_tensor("min", "max"), _CLAMP_MIN, is_usual=True, since=_CHANGED),
    Point("clamp", "at a maximum that is a tensor", SUPERGRADIENT, "1/2 to each", "torch.clamp(x[0], max=x[1])",
          (0, 0), (0.5, 0.5), _is_at_tensor("max", "min"), _CLAMP_MAX, is_usual=True, since=_CHANGED),
    Point("clamp", "at the minimum", ONE_SIDE, "1", "x.clamp(min=0)", (0,), (1,), at.equal_to("min"),
          _CLAMP_MIN, is_usual=True, before=_CHANGED),
    Point("clamp", "at the maximum", ONE_SIDE, "1", "x.clamp(max=1)", (1,), (1,), at.equal_to("max"),
          _CLAMP_MAX, is_usual=True, before=_CHANGED),
    Point("hardsigmoid", "at −3", SUBGRADIENT, "0", "F.hardsigmoid(x)", (-3,), (0,), at.equal(-3)),
    Point("hardsigmoid", "at 3", SUPERGRADIENT, "0", "F.hardsigmoid(x)", (3,), (0,), at.equal(3)),
    Point("hardswish", "at −3", SUPERGRADIENT, "0", "F.hardswish(x)", (-3,), (0,), at.equal(-3)),
    Point("hardswish", "at 3", SUPERGRADIENT, "1", "F.hardswish(x)", (3,), (1,), at.equal(3)),
    Point("hardshrink", "at ±λ", LIMIT, "0", "F.hardshrink(x)", (0.5,), (0,), at.equal_in_size("lambd")),
    Point("softshrink", "at λ", SUBGRADIENT, "0", "F.softshrink(x)", (0.5,), (0,), at.equal_to("lambd")),
    Point("softshrink", "at −λ", SUPERGRADIENT, "0", "F.softshrink(x)", (-0.5,), (0,),
          lambda given: given["self"] == -given["lambd"]),
    Point("elu", "at 0", GRADIENT, "1", "F.elu(x)", (0,), (1,)),
    Point("elu", "at 0, with α below 1", SUBGRADIENT, "α", "F.elu(x, 0.5)", (0,), (0.5,),
          at.only_if(lambda given: _left_slope(given) < 1, at.equal(0)), is_usual=True),
    Point("elu", "at 0, with α above 1", ONE_SIDE, "α", "F.elu(x, 2.0)", (0,), (2,),
          at.only_if(lambda given: _left_slope(given) > 1, at.equal(0)), is_usual=True),
    Point("selu", "at 0", ONE_SIDE, "1.758", "F.selu(x)", (0,), (1.7580993408473766,)),
    Point("celu", "at 0", GRADIENT, "1", "F.celu(x, 2.0)", (0,), (1,)),
    Point("softsign", "at 0", GRADIENT, "1", "F.softsign(x)", (0,), (1,)),
    # sizes and norms
    Point("abs", "at 0", SUBGRADIENT, "0", "x.abs()", (0,), (0,), at.equal(0)),
    Point("copysign", "at 0", SUBGRADIENT, "0", "torch.copysign(x, torch.ones_like(x))", (0,), (0,), at.equal(0)),
    Point("norm", "of a zero vector", SUBGRADIENT, "0", "torch.linalg.vector_norm(x)", (0, 0), (0, 0),
          at.only_if(_is_smooth_order, at.norm_is_zero), _NORM),
    Point("norm", "at 0, p = 1", SUBGRADIENT, "0", "torch.linalg.vector_norm(x, 1)", (0, 1), (0, 1),
          at.only_if(_has_order(1), at.equal(0)), _NORM),
    Point("norm", "at 0, p < 1", SUBGRADIENT, "0", "torch.linalg.vector_norm(x, 0.5)", (0, 1), (0, 1),
          at.only_if(lambda given: 0 < (given.get("ord", given.get("p")) or 2) < 1, at.zero_beside_others), _NORM),
    Point("norm", "at ties, p = ∞", SUBGRADIENT, _TIES, "torch.linalg.vector_norm(x, torch.inf)", (1, -1, 0),
          (0.5, -0.5, 0), at.only_if(_has_order(inf), at.tied_in_size), _NORM),
    Point("norm", "of a zero vector, p = ∞", SUBGRADIENT, "0", "torch.linalg.vector_norm(x, torch.inf)", (0, 0),
          (0, 0), at.only_if(_has_order(inf), at.norm_is_zero), _NORM),
    Point("dist", "at distance 0", SUBGRADIENT, "0", "torch.dist(x, torch.zeros_like(x))", (0, 0), (0, 0),
          lambda given: (given["self"] == given["other"]).all()),
    Point("cdist", "at distance 0", SUBGRADIENT, "0", "torch.cdist(x[None], torch.zeros_like(x)[None])", (0, 0),
          (0, 0), at.at_distance_zero, ("_cdist_forward", "cdist", "_euclidean_dist"), of="x1"),
    Point("cdist", "at ties, p = ∞", NONE_OF_THEM, "1 to each tie",
          "torch.cdist(x[None], torch.zeros_like(x)[None], p=torch.inf)", (1, 1), (1, 1)),
    Point("pdist", "at distance 0", SUBGRADIENT, "0", "F.pdist(x[:, None])", (1, 1), (0, 0),
          lambda given: torch.pdist(given["self"]) == 0, ("_pdist_forward", "pdist")),
    Point("hypot", "where both are 0", NONE_OF_THEM, "NaN", "torch.hypot(x[0], x[1])", (0, 0), (nan, nan),
          at.both_equal(0)),
    Point("std", "of equal numbers", SUBGRADIENT, "0", "x.std()", (1, 1), (0, 0), at.no_spread),
    Point("std", "of too few numbers", ARBITRARY, "NaN", "x.std()", (1,), (nan,), at.too_few),
    Point("var", "of equal numbers", GRADIENT, "0", "x.var()", (1, 1), (0, 0)),
    Point("var", "of too few numbers", ARBITRARY, "NaN", "x.var()", (1,), (nan,), at.too_few),
    Point("normalize", "of a zero vector", GRADIENT, "1/ε", "F.normalize(x, dim=0, eps=0.01)[0]", (0, 0), (100, 0)),
    Point("cosine_similarity", "of a zero vector", GRADIENT, "1/ε times the other direction",
          "F.cosine_similarity(x, torch.ones_like(x), 0, eps=0.01)", (0, 0), (100 / 2**0.5, 100 / 2**0.5)),
    # roots, powers, logarithms and quotients
    Point("sqrt", "at 0", LIMIT, "∞", "x.sqrt()", (0,), (inf,), at.equal(0)),
    Point("sqrt", "below 0", ARBITRARY, "NaN", "x.sqrt()", (-1,), (nan,), at.below(0)),
    Point("rsqrt", "at 0", LIMIT, "−∞", "x.rsqrt()", (0,), (-inf,), at.equal(0)),
    Point("rsqrt", "below 0", ARBITRARY, "NaN", "x.rsqrt()", (-1,), (nan,), at.below(0)),
    Point("pow", "at 0, exponent between 0 and 1", LIMIT, "∞", "x ** 0.5", (0,), (inf,),
          lambda given: (given["self"] == 0) & (given["exponent"] > 0) & (given["exponent"] < 1)),
    Point("pow", "at 0, exponent below 0", LIMIT, "−∞", "x ** -1", (0,), (-inf,),
          lambda given: (given["self"] == 0) & (given["exponent"] < 0)),
    Point("pow", "below 0, broken exponent", ARBITRARY, "NaN", "x ** 0.5", (-1,), (nan,),
          lambda given: (given["self"] < 0) & (given["exponent"] != torch.as_tensor(given["exponent"]).round())),
    Point("log", "at 0", LIMIT, "∞", "x.log()", (0,), (inf,), at.equal(0)),
    Point("log", "below 0", ARBITRARY, "1/x, though the value is NaN", "x.log()", (-1,), (-1,), at.below(0)),
    Point("log2", "at 0", LIMIT, "∞", "x.log2()", (0,), (inf,), at.equal(0)),
    Point("log2", "below 0", ARBITRARY, "1/(x ln 2), though the value is NaN", "x.log2()", (-1,),
          (-1.4426950408889634,), at.below(0)),
    Point("log10", "at 0", LIMIT, "∞", "x.log10()", (0,), (inf,), at.equal(0)),
    Point("log10", "below 0", ARBITRARY, "1/(x ln 10), though the value is NaN", "x.log10()", (-1,),
          (-0.43429448190325187,), at.below(0)),
    Point("log1p", "at −1", LIMIT, "∞", "x.log1p()", (-1,), (inf,), at.equal(-1)),
    Point("log1p", "below −1", ARBITRARY, "1/(1 + x), though the value is NaN", "x.log1p()", (-2,), (-1,),
          at.below(-1)),
    Point("logit", "at 0 and 1", LIMIT, "∞", "x.logit()", (0,), (inf,),
          lambda given: ((given["self"] == 0) | (given["self"] == 1)) & (given.get("eps") is None)),
    Point("reciprocal", "at 0", LIMIT, "−∞", "1 / x", (0,), (-inf,), at.equal(0)),
    Point("div", "by 0", LIMIT, "±∞", "x[0] / x[1]", (1, 0), (inf, -inf),
          lambda given: torch.as_tensor(given["other"] == 0) & (given["self"] != 0), of="other"),
    Point("div", "of 0 by 0", ARBITRARY, "NaN", "x[0] / x[1]", (0, 0), (inf, nan),
          lambda given: torch.as_tensor(given["other"] == 0) & (given["self"] == 0), of="other"),
    Point("xlogy", "where both are 0", ARBITRARY, "NaN", "torch.xlogy(x, x)", (0,), (nan,), at.both_equal(0)),
    Point("entr", "at 0", LIMIT, "∞", "torch.special.entr(x)", (0,), (inf,), at.equal(0), ("special_entr",)),
    Point("entr", "below 0", ARBITRARY, "NaN", "torch.special.entr(x)", (-1,), (nan,), at.below(0),
          ("special_entr",)),
    Point("binary_cross_entropy", "at 0 and 1, for another target", ARBITRARY, "∓10¹²",
          "F.binary_cross_entropy(x, torch.ones_like(x))", (0,), (-1000000003995.8029,),
          lambda given: (at.equal(0)(given) | at.equal(1)(given)) & (given["self"] != given["target"])),
    # inverse functions at the ends of where they are defined
    Point("acos", "at ±1", LIMIT, "−∞", "x.acos()", (1,), (-inf,), at.equal_in_size(1)),
    Point("acos", "beyond ±1", ARBITRARY, "NaN", "x.acos()", (2,), (nan,), at.beyond(1)),
    Point("asin", "at ±1", LIMIT, "∞", "x.asin()", (1,), (inf,), at.equal_in_size(1)),
    Point("asin", "beyond ±1", ARBITRARY, "NaN", "x.asin()", (2,), (nan,), at.beyond(1)),
    Point("acosh", "at 1", LIMIT, "∞", "x.acosh()", (1,), (inf,), at.equal(1)),
    Point("acosh", "below 1", ARBITRARY, "NaN", "x.acosh()", (0,), (nan,), at.below(1)),
    Point("atanh", "at ±1", LIMIT, "∞", "x.atanh()", (1,), (inf,), at.equal_in_size(1)),
    Point("atanh", "beyond ±1", ARBITRARY, "1/(1 − x²), though the value is NaN", "x.atanh()", (2,), (-1 / 3,),
          at.beyond(1)),
    Point("erfinv", "at ±1", LIMIT, "∞", "x.erfinv()", (1,), (inf,), at.equal_in_size(1)),
    Point("atan2", "where both are 0", ARBITRARY, "0", "torch.atan2(x[0], x[1])", (0, 0), (0, 0), at.both_equal(0)),
    Point("lgamma", "at 0 and negative whole numbers", ARBITRARY, "−∞ or NaN", "x.lgamma()", (-1,), (nan,),
          lambda given: (given["self"] <= 0) & (given["self"].frac() == 0)),
    # ties
    Point("amax", "at ties", SUBGRADIENT, _TIES, "x.amax()", (1, 1, 0), (0.5, 0.5, 0), at.tied_with(torch.amax)),
    Point("amin", "at ties", SUPERGRADIENT, _TIES, "x.amin()", (1, 1, 2), (0.5, 0.5, 0), at.tied_with(torch.amin)),
    Point("max()", "at ties", SUBGRADIENT, _TIES, "x.max()", (1, 1, 0), (0.5, 0.5, 0),
          at.only_if(_is_whole_tensor, at.tied_with(torch.amax)), ("max",)),
    Point("min()", "at ties", SUPERGRADIENT, _TIES, "x.min()", (1, 1, 2), (0.5, 0.5, 0),
          at.only_if(_is_whole_tensor, at.tied_with(torch.amin)), ("min",)),
    Point("max(dim)", "at ties", ONE_SIDE, _FIRST, "x.max(0).values", (1, 1, 0), (1, 0, 0),
          at.only_if(lambda given: "dim" in given, at.tied_with(torch.amax)), ("max",)),
    Point("min(dim)", "at ties", ONE_SIDE, _FIRST, "x.min(0).values", (1, 1, 2), (1, 0, 0),
          at.only_if(lambda given: "dim" in given, at.tied_with(torch.amin)), ("min",)),
    Point("maximum", "where both are equal", SUBGRADIENT, "1/2 to each", "torch.maximum(x[0], x[1])", (1, 1),
          (0.5, 0.5), at.same, is_usual=True),
    Point("minimum", "where both are equal", SUPERGRADIENT, "1/2 to each", "torch.minimum(x[0], x[1])", (1, 1),
          (0.5, 0.5), at.same, is_usual=True),
    Point("fmax", "where both are equal", SUBGRADIENT, "1/2 to each", "torch.fmax(x[0], x[1])", (1, 1), (0.5, 0.5),
          at.same, is_usual=True, since=_CHANGED),
    Point("fmin", "where both are equal", SUPERGRADIENT, "1/2 to each", "torch.fmin(x[0], x[1])", (1, 1), (0.5, 0.5),
          at.same, is_usual=True, since=_CHANGED),
    Point("fmax", "where both are equal", ONE_SIDE, "all to the first", "torch.fmax(x[0], x[1])", (1, 1), (1, 0),
          at.same, is_usual=True, before=_CHANGED),
    Point("fmin", "where both are equal", ONE_SIDE, "all to the first", "torch.fmin(x[0], x[1])", (1, 1), (1, 0),
          at.same, is_usual=True, before=_CHANGED),
    Point("median()", "at ties", NONE_OF_THEM, _TIES, "x.median()", (1, 1, 1), (1 / 3, 1 / 3, 1 / 3),
          at.only_if(_is_whole_tensor, at.tied_with_result(at.pick_median)), ("median",)),
    Point("median(dim)", "at ties", LIMIT, "all to one of the ties", "x.median(0).values", (1, 1, 0), (1, 0, 0),
          at.only_if(lambda given: "dim" in given, at.tied_with_result(at.pick_median)), ("median",)),
    Point("kthvalue", "at ties", LIMIT, "all to one of the ties", "x.kthvalue(2).values", (1, 1, 0), (1, 0, 0),
          at.tied_with_result(at.pick_kth)),
    Point("sort", "at ties", LIMIT, "in the order in which they lie", "x.sort().values[0]", (1, 1, 2), (1, 0, 0),
          at.repeated),
    Point("topk", "at ties", LIMIT, "to those that it picks", "x.topk(1).values", (1, 1, 0), (1, 0, 0),
          at.tied_at_top),
    Point("cummax", "at ties", ONE_SIDE, "all to the last of the ties", "x.cummax(0).values[1]", (1, 1), (0, 1),
          at.repeated),
    Point("cummin", "at ties", ONE_SIDE, "all to the last of the ties", "x.cummin(0).values[1]", (1, 1), (0, 1),
          at.repeated),
    Point("max_pool", "at ties", ONE_SIDE, _FIRST, "F.max_pool2d(x.view(1, 2, 2), 2)", (1, 1, 0, 1), (1, 0, 0, 0),
          at.tied_in_window, _POOLS),
    Point("adaptive_max_pool", "at ties", ONE_SIDE, _FIRST, "F.adaptive_max_pool2d(x.view(1, 2, 2), 1)",
          (1, 1, 0, 1), (1, 0, 0, 0), at.tied_in_cell, _ADAPTIVE),
    Point("eigh", "at equal eigenvalues", ARBITRARY, "NaN to eigenvectors",
          "torch.linalg.eigh(torch.diag(x)).eigenvectors.abs()[0, 0]", (1, 1), (nan, nan), at.equal_eigenvalues,
          ("_linalg_eigh",), of="A"),
    Point("eigvalsh", "at equal eigenvalues", ONE_SIDE, "that of one basis of eigenvectors",
          "torch.linalg.eigvalsh(torch.diag(x))[0]", (1, 1), (1, 0)),
    Point("svd", "at equal singular values", ARBITRARY, "NaN to singular vectors",
          "torch.linalg.svd(torch.diag(x)).U[0, 0]", (1, 1), (nan, nan), at.equal_singular_values,
          ("_linalg_svd",), of="A"),
    Point("svdvals", "at equal singular values", ONE_SIDE, "that of one basis of singular vectors",
          "torch.linalg.svdvals(torch.diag(x))[0]", (1, 1), (1, 0)),
    Point("matrix_norm(2)", "at equal singular values", SUBGRADIENT, _TIES,
          "torch.linalg.matrix_norm(torch.diag(x), 2)", (1, 1), (0.5, 0.5)),
    # steps
    Point("sign", "at 0", LIMIT, "0", "x.sign()", (0,), (0,), at.equal(0), ("sign", "sgn"), is_usual=True),
    Point("round", "half way between whole numbers", LIMIT, "0", "x.round()", (0.5,), (0,),
          lambda given: (given["self"].frac().abs() == 0.5) & (given.get("decimals", 0) == 0), is_usual=True),
    Point("floor", "at whole numbers", LIMIT, "0", "x.floor()", (1,), (0,), at.whole, is_usual=True),
    Point("ceil", "at whole numbers", LIMIT, "0", "x.ceil()", (1,), (0,), at.whole, is_usual=True),
    Point("trunc", "at whole numbers", LIMIT, "0", "x.trunc()", (1,), (0,), at.whole, is_usual=True),
    Point("frac", "at whole numbers", LIMIT, "1", "x.frac()", (1,), (1,), at.whole, is_usual=True),
    Point("fmod", "at multiples", LIMIT, "1", "torch.fmod(x, 1.0)", (1,), (1,), at.multiple, is_usual=True),
    Point("remainder", "at multiples", LIMIT, "1", "torch.remainder(x, 1.0)", (1,), (1,), at.multiple,
          is_usual=True),
    Point("where", "where its condition changes", LIMIT, "that of the branch taken",
          "torch.where(x > 0, 2 * x, x)", (0,), (1,)),
    Point("nan_to_num", "where not finite", GRADIENT, "0", "x.nan_to_num()", (inf,), (0,)),
    # losses
    Point("l1_loss", "at the target", SUBGRADIENT, "0", "F.l1_loss(x, torch.zeros_like(x))", (0,), (0,)),
    Point("smooth_l1_loss", "at β from the target", GRADIENT, "1", "F.smooth_l1_loss(x, torch.zeros_like(x))",
          (1,), (1,)),
    Point("huber_loss", "at δ from the target", GRADIENT, "1", "F.huber_loss(x, torch.zeros_like(x))", (1,), (1,)),
    Point("hinge_embedding_loss", "at the margin", SUBGRADIENT, "0",
          "F.hinge_embedding_loss(x, -torch.ones_like(x))", (1,), (0,), since=_CHANGED),
    Point("margin_ranking_loss", "at the margin", SUBGRADIENT, "0",
          "F.margin_ranking_loss(x[:1], x[1:], torch.ones_like(x[:1]))", (0, 0), (0, 0), since=_CHANGED),
    Point("hinge_embedding_loss", "at the margin", ONE_SIDE, "−1",
          "F.hinge_embedding_loss(x, -torch.ones_like(x))", (1,), (-1,), before=_CHANGED),
    Point("margin_ranking_loss", "at the margin", ONE_SIDE, "∓1",
          "F.margin_ranking_loss(x[:1], x[1:], torch.ones_like(x[:1]))", (0, 0), (-1, 1), before=_CHANGED),
    Point("multi_margin_loss", "at the margin", SUBGRADIENT, "0",
          "F.multi_margin_loss(x[None], torch.tensor([0]))", (1, 0), (0, 0),
          at.only_if(lambda given: given.get("p", 1) == 1, at.at_loss_edge)),
    # sums of exponentials of −∞
    Point("logsumexp", "of −∞ alone", ARBITRARY, "NaN", "x.logsumexp(0)", (-inf, -inf), (nan, nan),
          at.all_minus_infinity),
    Point("softmax", "of −∞ alone", ARBITRARY, "NaN", "x.softmax(0)[0]", (-inf, -inf), (nan, nan),
          at.all_minus_infinity, ("_softmax",)),
    Point("log_softmax", "of −∞ alone", ARBITRARY, "NaN", "x.log_softmax(0)[0]", (-inf, -inf), (nan, nan),
          at.all_minus_infinity, ("_log_softmax",)),
    Point("logaddexp", "where both are −∞", ARBITRARY, "NaN", "torch.logaddexp(x[0], x[1])", (-inf, -inf),
          (nan, nan), at.both_equal(-inf)),
    Point("logcumsumexp", "after −∞ alone", ARBITRARY, "NaN", "x.logcumsumexp(0)", (-inf, -inf), (nan, nan),
          at.leads_with_minus_infinity),
    # products
    Point("prod", "at 0", GRADIENT, "the product of the others", "x.prod()", (0, 2), (2, 0)),
    Point("cumprod", "at 0", GRADIENT, "the product of the others", "x.cumprod(0)[1]", (0, 2), (2, 0)),
    Point("det", "of a singular matrix", NONE_OF_THEM, "0, though the adjugate is its gradient",
          "torch.linalg.det(torch.diag(x))",
          (0, 1), (0, 0), at.singular("A"), ("_linalg_det",), of="A"),
    Point("slogdet", "of a singular matrix", LIMIT, "±∞", "torch.linalg.slogdet(torch.diag(x)).logabsdet",
          (0, 1), (inf, 1), at.singular("A"), ("_linalg_slogdet",), of="A"),
    Point("sinc", "at 0", GRADIENT, "0", "x.sinc()", (0,), (0,)),
    # what is drawn
    Point("bernoulli", "everywhere", ZERO, "0", "torch.bernoulli(x)", (0.5,), (0,), at.everything(), is_usual=True),
    Point("normal", "everywhere", ZERO, "0", "torch.normal(x, 1.0)", (0,), (0,), at.everything("mean"), of="mean",
          is_usual=True),
    Point("poisson", "everywhere", ZERO, "0", "torch.poisson(x)", (1,), (0,), at.everything(), is_usual=True),
    Point("dropout", "everywhere", GRADIENT, "that of the elements kept, scaled", "F.dropout(x, 0.0)", (1,), (1,)),
)  # fmt: skip
"""Every kind of point that is known, by what the operations do, in all versions of torch that are supported."""

POINTS = tuple(point for point in ALL_POINTS if point.holds)
"""Those of the torch that runs."""


def _by_key() -> dict[str, tuple[Point, ...]]:
    found: dict[str, tuple[Point, ...]] = {}
    for point in POINTS:
        if point.find is not None:
            for key in point.keys:
                found[key] = (*found.get(key, ()), point)
    return found


POINTS_OF: Mapping[str, tuple[Point, ...]] = _by_key()
"""Key of an operation (see ``key_of``) → those of its points that can be found."""
