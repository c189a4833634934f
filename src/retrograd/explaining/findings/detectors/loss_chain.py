"""Activations between the model's output and the loss that the loss applies itself, or needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from retrograd.core.runs.findings import Finding, Severity
from retrograd.explaining.findings.chain import AFFINE, LOSSES, SOFTMAXES, VIEWS, Chain, argument_of
from retrograd.explaining.findings.entry import Entry, Family, Predicate, first_operation
from retrograd.explaining.findings.record import Record

family = Family(__name__)

THROUGH = VIEWS | {"dropout"}
"""Functions that may follow an activation before the loss."""

_MADE = {"linear": "a linear layer", "product": "a linear layer", "conv2d": "a convolution", "conv1d": "a convolution"}
"""What a message calls the operation that made something."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What a loss must not be given.

    Attributes:
        loss: the function.
        makers: what made its first argument; ``product`` is a sum of a matrix product and something else.
        severity: how bad that is.
        message: of ``{maker}``, of ``{made}`` in words, of ``{before}`` that made what the maker takes, and of
            ``{floor}``, below which the loss cannot fall.
        before: where any, only if one of these made what the maker takes.
        through: functions that are passed over besides, for they hide that the values do not fit.
    """

    loss: str
    makers: tuple[str, ...]
    severity: Severity
    message: str
    before: tuple[str, ...] = ()
    through: tuple[str, ...] = ()

    def describe(self, chain: Chain, loss: int, maker: int) -> str:
        """The message, where the operation that made what a loss takes is one of these; else empty."""
        if chain.name(maker) in self.through:
            maker = chain.maker(maker, 0, THROUGH)
        if maker < 0:
            return ""
        name, before = _name_maker(chain, maker), chain.name(chain.maker(maker, 0, THROUGH))
        if chain.name(loss) != self.loss or name not in self.makers or (self.before and before not in self.before):
            return ""
        least = _least_loss(chain, loss)
        floor = f" and the loss cannot fall below {least:.3g}" if least else ""
        return self.message.format(maker=name, made=_MADE.get(name, name), before=before, floor=floor)


def _name_maker(chain: Chain, maker: int) -> str:
    is_product = chain.name(maker) == "add" and chain.name(chain.maker(maker, 0, frozenset())) in _PRODUCTS
    return "product" if is_product else chain.name(maker)


_PRODUCTS = ("matmul", "mm", "sparse_mm")
_NOT_LOGS = "nll_loss is given the result of {made}, where it expects log-probabilities: "
_SIGMOID = "binary_cross_entropy_with_logits"

_MISMATCHES: Mapping[str, tuple[Mismatch, ...]] = {
    "softmax-before-cross-entropy": (
        Mismatch(
            "cross_entropy",
            ("softmax",),
            "critical",
            "cross_entropy is given the result of softmax and applies softmax again, so its gradient is "
            "squashed{floor}",
        ),
        Mismatch(
            "cross_entropy",
            ("sigmoid",),
            "warning",
            "cross_entropy is given the result of sigmoid, between 0 and 1, where it expects logits",
        ),
        Mismatch(
            "cross_entropy",
            ("log_softmax",),
            "note",
            "cross_entropy is given the result of log_softmax and applies it again, which changes nothing",
        ),
    ),
    "activation-on-logits": (
        Mismatch(
            "cross_entropy",
            ("relu", "relu6"),
            "warning",
            "cross_entropy is given the result of relu, so no logit is below 0 and those at 0 learn nothing",
        ),
        Mismatch(
            "cross_entropy",
            ("tanh",),
            "warning",
            "cross_entropy is given the result of tanh, so all logits lie within −1 … 1",
        ),
    ),
    "sigmoid-before-bce-with-logits": (
        Mismatch(
            _SIGMOID,
            ("sigmoid", "softmax"),
            "critical",
            f"{_SIGMOID} is given the result of {{maker}} and applies sigmoid again, so no probability leaves "
            "0.5 … 0.73",
        ),
        Mismatch(
            "binary_cross_entropy",
            ("sigmoid",),
            "critical",
            "sigmoid is given the result of {before}, so no probability leaves 0.5 … 0.73",
            before=("sigmoid", "softmax"),
        ),
    ),
    "nll-on-probabilities": (
        Mismatch(
            "kl_div",
            ("softmax",),
            "critical",
            "kl_div is given the result of softmax first, where it expects log-probabilities",
        ),
        Mismatch("nll_loss", ("softmax", "sigmoid"), "critical", _NOT_LOGS + "its value is not a likelihood"),
        Mismatch("nll_loss", ("relu", *_MADE), "critical", _NOT_LOGS + "it falls without bound as they grow"),
    ),
    "bce-on-logits": (
        Mismatch(
            "binary_cross_entropy",
            ("linear", "conv2d", "conv1d", "tanh", "relu", "log_softmax"),
            "critical",
            "binary_cross_entropy is given the result of {made}, where it expects numbers from 0 to 1",
            through=("clamp",),
        ),
    ),
}


def find_mismatch(mismatches: Iterable[Mismatch]) -> Predicate:
    """A predicate that finds the first loss which is given one of these."""

    def judge(record: Record, chain: Chain, number: int, entry: Entry) -> Finding | None:
        maker = chain.maker(number, 0, THROUGH) if chain.name(number) in LOSSES else -1
        if maker < 0:
            return None
        for mismatch in mismatches:
            message = mismatch.describe(chain, number, maker)
            if message:
                return _describe(entry, record, chain, number, maker, mismatch.severity, message)
        return None

    return first_operation(judge)


def _describe(
    entry: Entry, record: Record, chain: Chain, loss: int, maker: int, severity: Severity, message: str
) -> Finding:
    line = record.place_of(chain, maker)[1]
    is_layer = chain.name(maker) in AFFINE | {"add"}  # with which nothing is wrong: something is missing behind it
    return entry.finding_at(
        record,
        chain,
        maker,
        message,
        severity=severity,
        line=chain.listed[loss].line if is_layer or not line else line,
        evidence=[
            ("what makes the loss's input", chain.name(maker)),
            ("the loss", chain.name(loss)),
            ("line of the loss", chain.listed[loss].line),
        ],
    )


for _slug, _mismatches in _MISMATCHES.items():
    family.detector(_slug)(find_mismatch(_mismatches))


def _least_loss(chain: Chain, loss: int) -> float:
    """The cross entropy of a probability of 1 for the right one of n classes."""
    shape = chain.taken(loss) or ()
    classes = shape[1] if len(shape) > 1 else 0
    return math.log(1 + (classes - 1) / math.e) if classes > 1 else 0.0


@family.detector("dropout-misplaced")
@first_operation
def dropout_misplaced(record: Record, chain: Chain, number: int, entry: Entry) -> Finding | None:
    """Dropout where it falsifies the output, or leaves next to nothing."""
    p = drop_rate(chain, number)
    if not p:
        return None
    loss = next((each for each in chain.losses() if _last_dropout(chain, each) == number), None)
    if loss is None:
        loss = _loss_by_hand(chain, number)
    if loss is None and p < 0.9:
        return None
    if loss is not None:
        message = (
            f"Dropout (p = {p:g}) is the last thing before {chain.name(loss)}, so {p:.0%} of the model's outputs "
            "are set to zero at each step"
        )
    else:
        message = f"Dropout drops {p:.0%} of what it is given, and leaves next to nothing to learn from"
    return entry.finding_at(
        record,
        chain,
        number,
        message,
        evidence=[("p", p, "> 0 before the loss, or ≥ 0.9 anywhere")],
        repair="lower p." if loss is None else "move dropout before the last layer.",
    )


def drop_rate(chain: Chain, number: int) -> float:
    """The share that an operation drops; 0 where it is not dropout, or off."""
    name = chain.name(number)
    if not name.endswith("dropout") and name not in ("dropout1d", "dropout2d", "dropout3d"):
        return 0.0
    operation = chain.listed[number]
    if argument_of(operation, "training") == "False":
        return 0.0
    text = argument_of(operation, "p") or operation.arguments.split(",")[0]
    try:
        return float(text)
    except ValueError:
        return 0.0


def _last_dropout(chain: Chain, loss: int) -> int:
    return chain.maker(loss, 0, VIEWS | SOFTMAXES | {"sigmoid"})


def _loss_by_hand(chain: Chain, number: int) -> int | None:
    """A difference to a target whose one side is what was dropped, and that is then squared or made absolute."""
    for user in chain.users(number):
        for each in [user, *chain.users(user)]:
            if chain.name(each) == "sub" and number == chain.maker(each, 0) and _is_distance(chain, each):
                return each
    return None


def _is_distance(chain: Chain, number: int) -> bool:
    return any(chain.name(each) in ("pow", "square", "abs") for each in chain.users(number))
