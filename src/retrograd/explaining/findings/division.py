"""Whether the loss of a micro-batch is divided by the number of micro-batches: told by the operations that made it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from retrograd.core.sites.site import Site
from retrograd.explaining.findings.chain import LOSSES, VIEWS, Chain, argument_of, count, factor_of
from retrograd.explaining.findings.numbers import median
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.updates import CLIPS, Update

Verdict = Literal["divided", "whole", "sum"]
"""A mean that is divided, one that is not, and a sum, whose micro-batches add up to that of the batch."""

_CLOSE = 1e-3
"""Relative: of numbers that were written with four places."""

_ROUGH = 0.5
"""Relative: weight decay is in an update too; gradients that were not divided are off by 1 and more."""

_CANCELLED = 0.01
"""Mean over root mean square below which a sum over elements is rounding."""

_MOST_LOOKED_AT = 8
"""Parameters."""

_COUNTS = frozenset({"sum", "count_nonzero", "numel", "nonzero", "bincount"})
"""Functions that count what a mask leaves."""


@dataclass(frozen=True, slots=True)
class _Term:
    """A term of what backward begins from.

    Attributes:
        factors: numbers that it is multiplied by.
        sizes: numbers of elements that it may be a sum of; a mean is one of 1.
        is_sum: it is one, and no mean.
        unknown: why it is not known which of them.
    """

    factors: tuple[float, ...] = ()
    sizes: frozenset[int] = frozenset({1})
    is_sum: bool = False
    unknown: str = ""


def judge_losses(record: Record, times: int) -> Verdict:
    """Judge the losses of a record whose updates have ``times`` micro-batches.

    Raises:
        CannotTell: it is not known what they were made of.
    """
    terms = [list(_find_terms(chain, chain.loss, _is_scaled(record))) for chain in record.need_chains()]
    verdicts = [{_judge(term, times) for term in each} for each in terms]
    if any("divided" in each for each in verdicts):
        return "divided"
    if all("whole" in each for each in verdicts):
        return "whole"
    for term in (term for each in terms for term in each):
        if _judge(term, times) is None:
            raise CannotTell(term.unknown or _explain_factor(term, times))
    return "sum"


def is_divided_by(record: Record, times: int) -> bool:
    """Check whether any loss is divided by this number of micro-batches."""
    return times > 1 and any(
        _judge(term, times) == "divided"
        for chain in record.chains
        for term in _find_terms(chain, chain.loss, _is_scaled(record))
    )


def is_divided_behind(record: Record, optimizer: str, updates: list[Update], times: int) -> bool:
    """Check whether updates of plain SGD are as if gradients were divided between backward and the update.

    The sum over the elements of an update is the learning rate times that of the gradients of all micro-batches.
    """
    made = record.optimizers.get(optimizer)
    if made is None or not optimizer.startswith("SGD"):
        return False
    has_memory = any(group.get("momentum") for group in made.groups)
    plain = [each for each in updates if not each.named(*CLIPS) and (each.is_first or not has_memory)]
    rates = {each.step: set(each.call.details.get("lr") or ()) for each in plain}
    sites = record.of_kind("parameter", "update")[:_MOST_LOOKED_AT]
    share = median([share for site in sites for share in _shares(record, site, rates)])
    return abs(share * times - 1) < _ROUGH


def _shares(record: Record, site: Site, rates: Mapping[int, set[float]]) -> Iterator[float]:
    """The update of a parameter over rate times gradient, as sums over elements, where they do not cancel."""
    name = str(replace(site, quantity="grad"))
    if name not in record.history:
        return
    gradient, update = record.series(name), record.series(site)
    with np.errstate(invalid="ignore", over="ignore"):
        given = np.where(np.abs(gradient.mean) > _CANCELLED * gradient.rms, gradient.mean * gradient.count, np.nan)
    sums = dict(zip(gradient.steps.tolist(), given.tolist(), strict=True))
    for step, changed in zip(update.steps.tolist(), (update.mean * update.count).tolist(), strict=True):
        rate = rates.get(step, set())
        if len(rate) == 1 and all(rate) and math.isfinite(sums.get(step, math.nan)):
            yield abs(changed / (sums[step] * next(iter(rate))))


def _is_scaled(record: Record) -> bool:
    return any(call.name.startswith("scaler.") for call in record.calls)


def _explain_factor(term: _Term, times: int) -> str:
    number = math.prod(term.factors)
    if term.is_sum:
        return f"the loss is a sum times {number:.4g}, by a count of one micro-batch or of all"
    return f"the loss is multiplied by {number:.4g}, and not by 1/{times}, for reasons of its own"


def _judge(term: _Term, times: int) -> Verdict | None:
    """What a term is; None where that is not known."""
    if term.unknown:
        return None
    if term.is_sum and not term.factors:
        return "sum"
    weights = [math.prod(term.factors) * size for size in term.sizes]
    is_divided = any(_is_close(weight * times) for weight in weights)
    if term.is_sum:
        is_whole = any(_is_close(weight) for weight in weights)
        is_divided |= max(weights, default=1) < 1 - _CLOSE  # by more than a micro-batch holds
        return None if is_whole == is_divided else "whole" if is_whole else "divided"
    if is_divided or any(_is_close(factor * times) for factor in term.factors):
        return "divided"
    return "whole" if abs(weights[0]) >= 1 - _CLOSE else None


def _is_close(number: float) -> bool:
    return math.isclose(abs(number), 1, rel_tol=_CLOSE)


_Way = tuple[int, tuple[float, ...], str]
"""An operation below the loss, what multiplies it on the way there, and the tensor that divides it, in words."""

_COUNT = "a count"


def _find_terms(chain: Chain, number: int, is_scaled: bool) -> Iterator[_Term]:
    """Go from the loss to the means and sums that it is made of."""
    waiting: list[_Way] = [(number, (), "")]
    seen = set(waiting)
    while waiting:
        way = number, factors, divisor = waiting.pop()
        below = _list_below(chain, way, is_scaled) if number >= 0 else []
        if not below:
            yield _divide(_read_term(chain, number, factors), divisor)
        waiting += [each for each in dict.fromkeys(below) if each not in seen]
        seen.update(below)


def _list_below(chain: Chain, way: _Way, is_scaled: bool) -> list[_Way]:
    """What an operation adds up, hands on or multiplies; nothing for one that makes a term."""
    number, factors, divisor = way
    name, operands, known = chain.name(number), chain.listed[number].operands, chain.operands(number)
    if name in ("add", "sub"):
        return [(each, factors, divisor) for each in known]
    if (name in VIEWS or name == "neg") and known:
        return [(known[0], factors, divisor)]
    if name not in ("mul", "div") or not operands or operands[0] < 0:
        return []
    factor = factor_of(chain, number) if len(operands) == 1 else 0.0
    if factor:
        return [(operands[0], (*factors, factor if name == "mul" else 1 / factor), divisor)]
    if name == "mul":
        return [(operands[0], factors, divisor if is_scaled else "the loss is multiplied by a tensor")]
    counting = chain.ancestors(operands[1]) if len(operands) == 2 and operands[1] >= 0 else ()
    is_count = not divisor and any(chain.name(each) in _COUNTS for each in counting)
    unknown = "the loss is divided by a tensor, which may count what all micro-batches hold"
    return [(operands[0], factors, _COUNT if is_count else unknown)]


def _divide(term: _Term, divisor: str) -> _Term:
    """A term that a tensor divides: a sum over a count is a mean."""
    if not divisor or term.unknown:
        return term
    if divisor == _COUNT and term.is_sum:
        return _Term(term.factors)
    return _Term(unknown=divisor if divisor != _COUNT else "a mean is divided by a count")


def _read_term(chain: Chain, number: int, factors: tuple[float, ...]) -> _Term:
    """What an operation makes that is no sum of terms."""
    name = chain.name(number)
    if name in LOSSES or name == "mean":
        return replace(_read_reduction(chain, number), factors=factors)
    if name == "sum":
        return _Term(factors, _sizes(chain.listed[number].takes[:1], chain, number), is_sum=True)
    if number < 0:
        return _Term(unknown="it was not seen what the loss is made of")
    return _Term(unknown=f"backward begins from what `{name}` makes, which need be neither a mean nor a sum")


def _read_reduction(chain: Chain, number: int) -> _Term:
    operation = chain.listed[number]
    reduction = argument_of(operation, "reduction") if chain.name(number) in LOSSES else None
    if reduction in (None, "mean", "batchmean"):
        return _Term()
    if reduction == "sum":
        return _Term(is_sum=True, sizes=_sizes(operation.takes[:2], chain, number))
    return _Term(unknown=f"`{chain.name(number)}` leaves its losses one by one")


def _sizes(takes: tuple[str, ...], chain: Chain, number: int) -> frozenset[int]:
    """Numbers by which a sum over tensors of these shapes may be divided for a mean: of samples, tokens, elements."""
    shapes = [chain.taken(number, place) or () for place in range(len(takes))]
    return frozenset(count(shape[:end]) for shape in shapes for end in range(1, len(shape) + 1))
