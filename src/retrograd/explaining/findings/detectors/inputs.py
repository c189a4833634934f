"""Inputs that are far from what layers are made for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from retrograd.core.history.facts import Input, Operation
from retrograd.core.runs.findings import Finding
from retrograd.core.sites.site import ROOT
from retrograd.explaining.findings.births import Births
from retrograd.explaining.findings.chain import AFFINE, VIEWS, Chain, argument_of, is_float, name_of
from retrograd.explaining.findings.detectors.precision import find_skips
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import MOVED, Training

family = Family(__name__, MOVED=MOVED)

WIDE = 10.0
"""Standard deviation, or magnitude of the mean, from which on an input is called unscaled; our own choice."""

NOT_FINITE = "the loss is not finite in the end"
"""An outcome of inputs that are not scaled."""

OVERFLOWS = 100.0
"""Scale of inputs from which on gradients of float16 that overflow are told to be of them; our own choice."""

FAR = 100.0
"""How many times the largest output, and 1, an error is where targets are not scaled; our own choice."""

DRIFTS = 5.0
"""How many times larger inputs become, from the first quarter of the steps to the last; our own choice."""

DRIFT_STEPS = 16
"""Steps whose inputs were recorded, from which on they can be said to drift."""

_ERRORS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
"""Losses that are means of errors, or of their squares."""

AT_CHANCE = 0.8
"""Share of the loss of guessing above which a classifier has learned nothing; our own choice."""


def list_inputs(record: Record) -> dict[str, list[Input]]:
    """Inputs of floating type of forwards that training reached, by name.

    Raises:
        CannotTell: there are none.
    """
    found = {}
    for name, listed in record.inputs.items():
        plain = [each for each in listed if is_float(each.dtype) and math.prod(each.shape) > 1]
        if plain:
            found[name] = plain
    if not found:
        raise CannotTell("no input of floating type was recorded")
    return found


@family.detector("input-unscaled")
def unscaled_input(record: Record, entry: Entry) -> Iterator[Finding]:
    """Inputs of large numbers, and training that suffers from them."""
    targets = list(_check_target(entry, record))
    yield from targets
    if targets:
        return
    for name, listed in list_inputs(record).items():
        scale = [max(each.std, abs(each.value)) for each in listed]
        if not min(scale) > WIDE or not is_taken_as_it_is(record.chains, listed[0]):
            continue
        outcome = describe_outcome(record) or _describe_overflow(record, min(scale))
        if outcome:
            yield _describe(entry, name, listed, outcome)


@family.detector("input-drifts")
def drifting_input(record: Record, entry: Entry) -> Iterator[Finding]:
    """Inputs whose scale moves away while training goes on, and a loss that does not fall."""
    training = record.once(Training)
    training.need_loss(DRIFT_STEPS)
    for name, every in list_inputs(record).items():
        listed = [each for each in every if each.moment.phase == "train"]
        if name.partition(":")[0] not in record.root_names | {ROOT} or len(listed) < DRIFT_STEPS or training.fell:
            continue
        scales = np.array([math.hypot(each.std, each.value) for each in listed])
        quarters = [float(np.median(part)) for part in np.array_split(scales, 4)]
        is_steady = all(later > before for before, later in pairwise(quarters))
        if is_steady and quarters[-1] > DRIFTS * quarters[0] > 0:
            yield entry.finding(
                f"Inputs drift: the root mean square of {name} goes from {scales[0]:.3g} to {scales[-1]:.3g} while the "
                f"loss goes from {training.early:.3g} to {training.late:.3g}",
                site=name,
                span=listed,
                evidence=[
                    ("median of the last quarter over that of the first", quarters[-1] / quarters[0], f"> {DRIFTS:g}")
                ],
            )


def _check_target(entry: Entry, record: Record) -> Iterator[Finding]:
    """Hold the error of a regression against what the model gives out, in a run whose loss has not fallen."""
    loss, training = _find_regression(record.chains), record.once(Training)
    output = _largest_outputs(record)
    if loss is None or not len(training.loss.values) or output is None or training.fell:
        return
    squared = name_of(loss) == "mse_loss"
    error = [float(np.sqrt(each)) if squared else float(each) for each in (training.initial, training.late)]
    if not min(error) > FAR * max(output, 1.0):
        return
    yield entry.finding(
        f"Targets are not scaled: outputs are within ±{output:.3g}, and they are off by {error[0]:.3g} in "
        f"{name_of(loss)}, so that the loss has hardly fallen ({training.initial:.3g} to {training.late:.3g})",
        case="targets",
        site=loss.module,
        step=int(training.loss.steps[0]),
        last_step=record.last_step,
        line=loss.line,
        evidence=[
            ("error at first", error[0], f"> {FAR:g} times the outputs, and {FAR:g}"),
            ("error at the end", error[1], f"> {FAR:g} times the outputs, and {FAR:g}"),
            ("largest output", output),
        ],
    )


def _describe(entry: Entry, name: str, listed: Sequence[Input], outcome: str) -> Finding:
    first = listed[0]
    return entry.finding(
        f"Inputs are not scaled: {name} has mean {first.value:.3g} and standard deviation {first.std:.3g} "
        f"({first.min:.3g} … {first.max:.3g}) and goes into a layer as it is, and {outcome}",
        severity="critical" if outcome == NOT_FINITE else "warning",
        site=name,
        step=first.step,
        last_step=listed[-1].step,
        evidence=[
            ("standard deviation", first.std, f"> {WIDE:g}, or the mean"),
            ("mean", first.value, f"> {WIDE:g} in magnitude, or the standard deviation"),
        ],
    )


def _find_regression(chains: Sequence[Chain]) -> Operation | None:
    """The mean of errors that the loss is, where it is one and no more."""
    for chain in chains[:1]:
        last = chain.listed[chain.loss] if chain.loss >= 0 else None
        if last is not None and name_of(last) in _ERRORS and argument_of(last, "reduction") in (None, "mean"):
            return last
    return None


def _largest_outputs(record: Record) -> float | None:
    """The largest magnitude that the models have given out; None where that was not recorded."""
    sites = [str(site) for site in record.of_kind("output") if site.path in record.root_names]
    pieces = (matrix.values for [matrix] in record.history.matrices(["abs_max"], sites)) if sites else ()
    return max((float(np.nanmax(values)) for values in pieces if np.isfinite(values).any()), default=None)


def is_taken_as_it_is(chains: Sequence[Chain], given: Input) -> bool:
    """Check whether an affine layer takes what the model was given, in another shape at most."""
    for chain in chains[:1]:
        for number in range(len(chain)):
            if chain.name(number) in AFFINE and chain.maker(number, 0, VIEWS) < 0:
                shape = chain.taken(number) or ()
                if math.prod(shape) == math.prod(given.shape):
                    return True
    return False


def describe_outcome(record: Record) -> str:
    """Describe what is wrong with the loss in the end; empty where the model has learned something."""
    values = record.loss.values
    if not len(values):
        return ""
    if not np.isfinite(values).all():
        return NOT_FINITE if record.once(Births).is_of_size else ""  # what is missing, or masked, has not come of that
    guess = guessing_loss(record)
    end = float(np.median(values[-max(1, len(values) // 5) :]))
    if guess and end > AT_CHANCE * guess:
        return f"the loss ({end:.3g}) is no better than guessing ({guess:.3g})"
    if not record.once(Training).fell:
        return f"the loss does not fall ({values[0]:.3g} to {end:.3g})"
    return ""


def _describe_overflow(record: Record, scale: float) -> str:
    """Describe that gradients overflow in float16 where inputs are so large; empty where they do not."""
    skips = record.once(find_skips)
    is_half = any(
        chain.name(number) in AFFINE and chain.listed[number].makes[0].startswith("float16")
        for chain in record.chains[:1]
        for number in range(len(chain))
        if chain.maker(number, 0, VIEWS) < 0
    )
    if skips is None or not skips.are_many or not is_half or scale < OVERFLOWS:
        return ""
    return (
        f"the layer's gradient, the input times the error times the scale, overflows float16: {skips.skipped.sum()} of "
        f"{len(skips.skipped)} updates were skipped, at scales down to {min(skips.scales.values(), default=1.0):g}"
    )


def guessing_loss(record: Record) -> float:
    """The cross entropy of guessing among the classes; 0 where the loss is another."""
    for chain in record.chains[:1]:
        for number in chain.losses():
            shape = chain.taken(number) or ()
            if chain.name(number) in ("cross_entropy", "nll_loss") and len(shape) > 1:
                return math.log(shape[1])
    return 0.0
