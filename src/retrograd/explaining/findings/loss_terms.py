"""What backward began from, taken apart into its addends, each with its share; and in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from retrograd.core.history.data_facts import LossParts
from retrograd.core.history.facts import CARRIED, Operation
from retrograd.core.sites.site import ROOT
from retrograd.explaining.findings.chain import LOSSES, VIEWS, Chain, argument_of, factor_of, name_of
from retrograd.explaining.findings.record import Record

SUMS = frozenset({"add", "sub", "rsub"})
SQUARES = frozenset({"pow", "square", "abs", "norm", "vector_norm", "linalg_norm", "linalg_vector_norm"})
_SUMMARIES = frozenset({"sum", "mean", "nanmean", "nansum"})
_JOINS = frozenset({"stack", "cat", "hstack"})
_MOST = 12
"""Sums within one another that are taken apart, and losses of a list: more are the steps of an episode, not terms."""

_DEEP = 4
"""Operations within one another that are written out."""


class Factor(NamedTuple):
    """What a sum of terms is multiplied by: a number, or what one operation made of another's result."""

    number: float = 1.0
    outer: int = -1
    inner: int = -1

    def of(self, parts: LossParts) -> float:
        """Its value in one pass."""
        return self.number if self.outer < 0 else parts.sum_of(self.outer) / (parts.sum_of(self.inner) or math.nan)


@dataclass(frozen=True, slots=True)
class Term:
    """An addend of a loss.

    Attributes:
        number: the operation that made it, before it was weighted; −1 for none that was recorded.
        top: the one whose result is added.
        line: of that which made it.
        text: it in words, weighted.
        has_graph: it is differentiated.
        sign: −1 where it is subtracted.
        values: what it counted in each pass that was looked at.
        share: its largest part of the sum of all sizes; NaN where no values are known.
        last_share: the same of the last pass.
    """

    number: int
    top: int
    line: str
    text: str
    has_graph: bool
    sign: int
    values: tuple[float, ...] = ()
    share: float = math.nan
    last_share: float = math.nan


class Loss:
    """What a backward pass began from.

    Args:
        record: of which run.
        chain: the operations that it is made of.
    """

    def __init__(self, record: Record, chain: Chain) -> None:
        self.chain = chain
        self._record = record
        self.number = record.root_of(chain)

    @property
    def line(self) -> str:
        """Of the operation that made it."""
        return self.chain.listed[self.number].line

    @cached_property
    def parts(self) -> list[LossParts]:
        """Its numbers in the passes that were looked at."""
        at = self.chain.loss, self.chain.listed[self.chain.loss].line
        return [each for each in self._record.of(LossParts) if (each.loss, each.line) == at]

    @property
    def called(self) -> str:
        """Where backward was called; empty where that was not recorded."""
        return self.parts[0].called if self.parts else ""

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """Its addends, in order."""
        found = list(self._split(self.number, ()))
        sizes = [[abs(each) for each in term.values] for term in found]
        totals = [math.fsum(each) for each in zip(*sizes, strict=True)]
        return tuple(_weigh(term, mine, totals) for term, mine in zip(found, sizes, strict=True))

    @property
    def text(self) -> str:
        """The loss as an expression: ``cross_entropy(head(…), target) + 0.1 · mse_loss(…)``."""
        text = ""
        for term in self.terms:
            text += f"{' − ' if term.sign < 0 else ' + '}{term.text}" if text else f"{'−' * (term.sign < 0)}{term.text}"
        return text

    def _split(self, number: int, factors: tuple[Factor, ...], deep: int = 0) -> Iterator[Term]:
        """The terms of what an operation made, which counts as often as the factors say."""
        top, before = number, len(factors)
        inner, more = self._step(number) if deep < _MOST else ((), ())
        while len(inner) == 1 and number >= 0:
            number, factors = inner[0], (*factors, *more)
            inner, more = self._step(number)
        if not inner:
            yield self._make(number, top, factors, before)
        for each, own in zip(inner, more, strict=True):
            yield from self._split(each, (*factors, own), deep + 1)

    def _step(self, number: int) -> tuple[tuple[int, ...], tuple[Factor, ...]]:
        """What an operation sums up, or multiplies, with the factors; nothing where it makes a term."""
        if number < 0:
            return (), ()
        chain, operation = self.chain, self.chain.listed[number]
        name, operands = chain.name(number), operation.operands
        is_single = bool(operation.makes) and math.prod(chain.made(number)) == 1
        if name in SUMS and len(operands) == 2 and (is_single or all(map(self._is_loss, operands))):
            alpha = float(argument_of(operation, "alpha") or 1)
            signs = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-1, 1)}[name]
            return operands, tuple(map(Factor, signs))
        if name in _JOINS and operands and operation.makes[0].startswith(("float", "bfloat")):
            singles = len(operands) <= _MOST and not any(chain.taken(number, place) for place in range(len(operands)))
            return (operands, (Factor(),) * len(operands)) if singles else ((), ())
        if name in _SUMMARIES and is_single:
            return self._reduce(number)
        if len(operands) == 1 and (name in VIEWS or name in ("neg", *SUMS)) and name != "detach":
            return operands, (Factor(-1.0 if name in ("neg", "rsub") else 1.0),)
        return self._scale(number) if name in ("mul", "div") else ((), ())

    def _reduce(self, number: int) -> tuple[tuple[int, ...], tuple[Factor, ...]]:
        chain, maker = self.chain, self.chain.maker(number)
        if maker < 0:
            return (), ()
        size = math.prod(chain.taken(number) or ())
        factor = Factor(1 / size if chain.name(number) == "mean" and size else 1.0)
        inner, _ = self._step(maker) if chain.name(maker) in _JOINS | {"add"} or size == 1 else ((), ())
        return ((maker,), (factor,)) if len(inner) > 1 or size == 1 else ((), ())

    def _scale(self, number: int) -> tuple[tuple[int, ...], tuple[Factor, ...]]:
        chain, operation = self.chain, self.chain.listed[number]
        operands = operation.operands
        if len(operands) == 1:
            plain = factor_of(chain, number)
            scale = 1 / plain if chain.name(number) == "div" and plain else plain
            return (operands, (Factor(scale),)) if plain else ((), ())
        graphs = [self._has_graph(each) for each in operands]
        other = operands[1] if graphs[0] else operands[0]
        is_weight = sum(graphs) == 1 and math.prod(chain.taken(number, graphs.index(False)) or ()) == 1
        inner = operands[graphs.index(True)] if is_weight else -1
        return ((inner,), (Factor(math.nan, number, inner),)) if inner >= 0 and other != inner else ((), ())

    def _has_graph(self, number: int) -> bool:
        return number == CARRIED or (number >= 0 and bool(self.chain.listed[number].node))

    def _is_loss(self, number: int, deep: int = 8) -> bool:
        """Check whether something is a loss of each sample: a distance, or a sum, whatever it is multiplied by."""
        name = self.chain.name(number)
        if number < 0 or not deep:
            return False
        if name in LOSSES | SQUARES | _SUMMARIES:
            return True
        is_through = name in VIEWS or name in ("neg", "mul", "div")
        return is_through and any(self._is_loss(each, deep - 1) for each in self.chain.operands(number))

    def _make(self, number: int, top: int, factors: tuple[Factor, ...], before: int) -> Term:
        """A term that an operation made; of the factors those before the given place count what stands on top."""
        plain = math.prod(each.number for each in factors if each.outer < 0)
        scales = any(each.outer >= 0 for each in factors)
        module = self.chain.listed[number].module if number >= 0 else ""
        text = write(self._record, self.chain, number, module)
        size = f"{abs(plain):.3g}"
        weight = " · ".join((*((size,) if size != "1" else ()), *(("w",) if scales else ())))
        values = tuple(
            math.prod(each.of(parts) for each in factors[:before]) * parts.sum_of(top) for parts in self.parts
        )
        line = self.chain.listed[number].line if number >= 0 else ""
        return Term(
            number=number,
            top=top,
            line=line or self.line,
            text=f"{weight} · {text}" if weight else text,
            has_graph=self._has_graph(number),
            sign=-1 if plain < 0 else 1,
            values=values,
        )


def _weigh(term: Term, sizes: list[float], totals: list[float]) -> Term:
    shares = [mine / total if total > 0 else math.nan for mine, total in zip(sizes, totals, strict=True)]
    known = [share for share in shares if not math.isnan(share)]
    return replace(term, share=max(known), last_share=known[-1]) if known else term


def list_losses(record: Record) -> list[Loss]:
    """The losses of a run, one for each graph that was recorded."""
    return [loss for chain in record.chains if (loss := Loss(record, chain)).number >= 0]


def describe_loss(record: Record) -> list[Loss]:
    """The losses of a run, one for each place that made one: that of which most passes were looked at."""
    found: dict[str, Loss] = {}
    for loss in record.once(list_losses):
        known = found.get(loss.line)
        if known is None or len(loss.parts) > len(known.parts):
            found[loss.line] = loss
    return list(found.values())


# ---- in words ----

_BETWEEN = {"add": "+", "sub": "−", "mul": "·", "div": "/", "matmul": "@"}
_BACKWARDS = {"rsub": "−", "rdiv": "/"}


def write(record: Record, chain: Chain, number: int, module: str = "", deep: int = _DEEP) -> str:
    """What an operation made, as an expression of data and of what modules other than the given one gave."""
    if number < 0:
        return "…" if number == CARRIED else "data"
    operation = chain.listed[number]
    if operation.module not in ("", module):
        return f"{_name_module(record, operation.module)}(…)"
    if not deep:
        return "…"
    name, operands = chain.name(number), operation.operands
    if name in VIEWS and operands:
        return write(record, chain, operands[0], module, deep)
    inner = [write(record, chain, each, module, deep - 1) for each in operands]
    if not operation.node and set(inner) <= {"data"}:
        return "data"
    if number in chain.outputs and name.startswith("CompiledFunction"):
        return "model(…)"
    if name in LOSSES:
        inner = [*inner[:1], *("target" if each == "data" else each for each in inner[1:2])]
        told = (*inner, argument_of(operation, "reduction"), *_list_settings(operation))
        return f"{name}({', '.join(filter(None, told))})"
    return _write_plain(name, inner, operation.arguments.split(",")[0].strip())


_USUAL = {"ignore_index": "-100", "label_smoothing": "0.0", "beta": "1.0", "delta": "1.0", "log_target": "False",
          "margin": "1.0", "full": "False", "log_input": "True", "zero_infinity": "False", "blank": "0"}  # fmt: skip
"""Arguments of losses that are said where they are not as torch takes them."""


def _list_settings(operation: Operation) -> list[str]:
    """Arguments of a loss that change what it is: ``label_smoothing=0.1``, ``weight``."""
    weights = re.findall(r"\b(weight|pos_weight)=tensor", operation.arguments)
    if not weights and len(operation.takes) > 2 and name_of(operation) in _WEIGHTED:
        weights = ["weight"]  # by its place
    numbers = {name: argument_of(operation, name) for name in _USUAL}
    return [*weights, *(f"{name}={given}" for name, given in numbers.items() if given not in (None, _USUAL[name]))]


_WEIGHTED = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")


def _write_plain(name: str, inner: list[str], argument: str) -> str:
    if name in _BACKWARDS and inner and argument:
        return f"({argument} {_BACKWARDS[name]} {inner[0]})"
    if name in _BETWEEN and (len(inner) == 2 or (inner and argument)):
        return f"({inner[0]} {_BETWEEN[name]} {inner[1] if len(inner) > 1 else argument})"
    if name in ("pow", "square") and inner and argument in ("", "2", "2.0"):
        return f"{inner[0]}²"
    if name == "neg" and inner:
        return f"−{inner[0]}"
    plain = (each[1:-1] if each.startswith("(") and each.find(")") == len(each) - 1 else each for each in inner)
    return f"{name}({', '.join(plain)})"


def _name_module(record: Record, path: str) -> str:
    """A module, or the sequence that it is the end of."""
    parent = path.rpartition(".")[0]
    while record.type_of(parent or ROOT) == "Sequential" and path not in {ROOT, *record.models}:
        path, parent = parent or ROOT, parent.rpartition(".")[0]
    return "model" if path == ROOT else path
