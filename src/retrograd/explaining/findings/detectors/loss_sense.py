"""Losses that ask for the wrong thing: targets out of reach, the wrong sign, sums where means are meant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from retrograd.core.errors import RetrogradError
from retrograd.core.runs.findings import Finding
from retrograd.core.sites.site import ROOT
from retrograd.explaining.findings.births import Births
from retrograd.explaining.findings.chain import LOSSES, Chain, argument_of, factor_of
from retrograd.explaining.findings.detectors.loss_chain import Mismatch, find_mismatch
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import Training

family = Family(__name__)

INFINITY = math.inf

BOUNDS = {
    "relu": (0.0, INFINITY), "softplus": (0.0, INFINITY), "relu6": (0.0, 6.0), "sigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0), "softmax": (0.0, 1.0), "hardsigmoid": (0.0, 1.0), "hardtanh": (-1.0, 1.0),
    "logsigmoid": (-INFINITY, 0.0), "log_softmax": (-INFINITY, 0.0), "elu": (-1.0, INFINITY), "exp": (0.0, INFINITY),
}  # fmt: skip
"""Where the values of an activation lie."""

BEYOND = 0.1
"""How far beyond its bounds targets must lie, by the spread of output − target; our own choice."""

LOOKED_AT = 20
"""Steps at which outputs are held against targets."""


_PICKING = frozenset(
    {"getitem", "gather", "squeeze", "view", "diagonal", "diag", "mul", "sum", "index_select"}
)  # fmt: skip
"""Functions that pick log-probabilities out of all, or weight them."""


class TargetBounds(NamedTuple):
    """Bounds of targets, from outputs and gradients: one target is at most ``low``, one at least ``high``."""

    low: float
    high: float
    mean: float
    spread: float


_LOGITS = "binary_cross_entropy_with_logits"
_find_squashed_logits = find_mismatch(
    (
        Mismatch(
            _LOGITS,
            ("relu", "relu6"),
            "warning",
            f"{_LOGITS} is given the result of {{maker}}, so no probability is below 0.5 and what is at 0 "
            "learns nothing",
        ),
        Mismatch(
            _LOGITS, ("tanh",), "warning", f"{_LOGITS} is given the result of tanh, so all logits lie within −1 … 1"
        ),
    )
)


@family.detector("relu-on-output")
def bounded_output(record: Record, entry: Entry) -> Iterator[Finding]:
    """The last activation keeps the output from where it should go."""
    found = list(_find_squashed_logits(record, entry))
    yield from found or _compare_with_targets(record, entry)


def _compare_with_targets(record: Record, entry: Entry) -> Iterator[Finding]:
    for chain in record.need_chains():
        made = _find_output(chain)
        if made is None or chain.name(made) not in BOUNDS:
            continue
        reach = find_targets(record, chain)
        if reach is None:
            raise CannotTell("the model's output and its gradient were not recorded")
        low, high = BOUNDS[chain.name(made)]
        if reach.low < low - BEYOND * reach.spread or reach.high > high + BEYOND * reach.spread:
            yield _describe_targets(entry, record, chain, made, reach)
        return


def _describe_targets(entry: Entry, record: Record, chain: Chain, made: int, reach: TargetBounds) -> Finding:
    name = chain.name(made)
    low, high = BOUNDS[name]
    is_below = reach.low < low
    bound, found = (low, reach.low) if is_below else (high, reach.high)
    side = "below" if is_below else "above"
    return entry.finding_at(
        record,
        chain,
        made,
        f"The output ends in {name} and cannot be {side} {bound:g}, and targets are: some lie {side} {found:.3g}",
        evidence=[
            ("a target that is surely there", found, f"{'<' if is_below else '>'} {bound:g}"),
            ("mean of the targets", reach.mean),
        ],
        checked=["the loss is a mean squared error of this output, so its gradient tells the targets"],
        refute="targets beyond the bound are outliers that nothing is to be learned from",
    )


def _find_output(chain: Chain) -> int | None:
    """The operation that made what a mean squared error takes, if backward begins from that error itself."""
    if chain.loss < 0:
        return None
    name = chain.name(chain.loss)
    if name == "mse_loss" and argument_of(chain.listed[chain.loss], "reduction") in (None, "mean"):
        made = chain.maker(chain.loss, 0)
        return made if made >= 0 and made in chain.of_outputs else None
    if name != "mean":
        return None
    square = chain.maker(chain.loss, 0, frozenset())
    difference = chain.maker(square, 0, frozenset()) if _is_square(chain, square) else -1
    made = chain.maker(difference, 0) if chain.name(difference) == "sub" else -1
    return made if made >= 0 and made in chain.of_outputs else None


def _is_square(chain: Chain, number: int) -> bool:
    name = chain.name(number)
    return name == "square" or (name == "pow" and chain.listed[number].arguments.strip().rstrip(".0") == "2")


def find_targets(record: Record, chain: Chain) -> TargetBounds | None:
    """Find where targets lie, by the gradient of a mean squared error: output − gradient · n / 2."""
    name = f"{chain.fact.name or ROOT}:output"
    try:
        output, gradient = record.series(name), record.series(f"{name}.grad")
    except RetrogradError:
        return None
    shared, at, of = np.intersect1d(output.steps, gradient.steps, return_indices=True)
    at, of = at[:LOOKED_AT], of[:LOOKED_AT]
    if not len(shared):
        return None
    half = gradient.count[of] / 2
    least, most = gradient.min[of] * half, gradient.max[of] * half
    low, high = output.max[at] - most, output.min[at] - least
    mean = output.mean[at] - gradient.mean[of] * half
    if not np.isfinite(low).any():
        return None
    return TargetBounds(
        float(np.nanmin(low)), float(np.nanmax(high)), float(np.nanmean(mean)), float(np.nanmax(most - least))
    )


@family.detector("loss-wrong-sign")
def wrong_sign(record: Record, entry: Entry) -> Iterator[Finding]:
    """A loss that is made worse and worse."""
    chains = record.need_chains()
    if len(record.optimizers) > 1:
        raise CannotTell("several optimizers may work against each other")
    values = record.loss.values[np.isfinite(record.loss.values)]
    if len(values) < 3:
        raise CannotTell("too few losses were recorded to see where they go")
    maximises = any(group.get("maximize") for made in record.optimizers.values() for group in made.groups)
    for chain in chains[:1]:
        wrong, how = _find_negation(chain, maximises)
        if how and _gets_worse(values, maximises):
            yield entry.finding(
                f"{how}: it has gone from {values[0]:.3g} to {values[-1]:.3g}",
                site=chain.listed[wrong].module,
                step=chain.step,
                line=record.optimizer_line if maximises else chain.listed[wrong].line,
                evidence=[("first loss", float(values[0])), ("last loss", float(values[-1]), "further away")],
            )


def _gets_worse(values: np.ndarray[tuple[int], np.dtype[np.float64]], maximises: bool) -> bool:
    change = values[-3:].mean() - values[:3].mean()
    if maximises:
        return bool(change > 0.1 * abs(values[0]))
    return bool(change < -0.1 * abs(values[0]) and values[-1] < 0)


def _find_negation(chain: Chain, maximises: bool) -> tuple[int, str]:
    """The operation that has the wrong sign, and what to say of it; empty where none has."""
    first = chain.loss
    if first < 0:
        return -1, ""
    is_negated = chain.name(first) == "neg" or (
        chain.name(first) == "mul" and chain.listed[first].arguments.strip() in ("-1", "-1.0")
    )
    loss = chain.maker(first, 0, frozenset()) if is_negated else first
    name = chain.name(loss)
    what = name if name in LOSSES else "a mean of squares" if _is_mean_of_squares(chain, loss) else ""
    if what and is_negated == maximises:
        return -1, ""
    if what:
        how = f"Backward begins from the negative of {what}" if is_negated else f"The optimizer maximises {what}"
        return first, f"{how}, so training makes {what} larger"
    terms = [] if maximises else _find_terms(chain, first)
    if terms and all(sign < 0 for _, sign in terms):
        what = chain.name(terms[0][0])
        return first, f"Backward begins from the negative of a sum that holds {what}, so training makes {what} larger"
    if not is_negated and not maximises and _is_of_log_probabilities(chain, loss):
        how = f"Backward begins from a {name} of log-probabilities without a minus"
        return loss, f"{how}, so training makes them smaller"
    return -1, ""


def _is_mean_of_squares(chain: Chain, number: int) -> bool:
    return chain.name(number) == "mean" and _is_square(chain, chain.maker(number, 0, frozenset()))


def _is_of_log_probabilities(chain: Chain, number: int) -> bool:
    """Check whether an operation is the mean, or the sum, of some log-probabilities."""
    if chain.name(number) not in ("mean", "sum"):
        return False
    return chain.name(chain.maker(number, 0, _PICKING)) in ("log_softmax", "logsigmoid", "log_prob")


def _find_terms(chain: Chain, number: int, sign: int = 1) -> list[tuple[int, int]]:
    """The losses of torch that a sum is made of, each with the sign that it has there."""
    name, operands = chain.name(number), chain.listed[number].operands
    if name in LOSSES:
        return [(number, sign)]
    factor = factor_of(chain, number) if len(chain.operands(number)) == 1 else 0.0
    if name == "neg" or (name in ("mul", "div") and factor):
        sign = -sign if name == "neg" or factor < 0 else sign
        return _find_terms(chain, operands[0], sign) if operands[0] >= 0 else []
    if name not in ("add", "sub"):
        return []
    signs = (sign, -sign if name == "sub" else sign)
    known = [(each, one) for each, one in zip(operands, signs, strict=False) if each >= 0]
    return [found for each, one in known for found in _find_terms(chain, each, one)]


@family.detector("loss-reduction-sum")
def summed_loss(record: Record, entry: Entry) -> Iterator[Finding]:
    """A sum over the batch where the learning rate is that of a mean."""
    chain = record.need_chains()[0]
    loss = chain.loss
    is_sum = chain.name(loss) in LOSSES and argument_of(chain.listed[loss], "reduction") == "sum"
    plain = bool(record.optimizers) and all(name.startswith("SGD") for name in record.optimizers)
    if not is_sum or not plain or record.once(Training).fell or record.once(Births).is_sudden:
        return
    shape = list(chain.taken(loss) or ())
    yield entry.finding(
        f"{chain.name(loss)} sums over {shape}, so gradients are {shape[0] if shape else 1} times those of the "
        "mean, and training is unstable",
        site=chain.listed[loss].module,
        step=chain.step,
        line=chain.listed[loss].line,
        evidence=[("reduction", "sum"), ("last loss", float(record.loss.values[-1]), "not below the first")],
    )
