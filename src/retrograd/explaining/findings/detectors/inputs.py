"""Inputs that are far from what layers are made for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from retrograd.core.history.facts import Input, Operation
from retrograd.core.runs.findings import Evidence, Finding
from retrograd.explaining.findings.births import Births
from retrograd.explaining.findings.chain import AFFINE, VIEWS, Chain, argument_of, is_float, name_of
from retrograd.explaining.findings.detector import Detector, Words
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import MOVED, Training

WIDE = 10.0
"""Standard deviation, or magnitude of the mean, from which on an input is called unscaled; our own choice."""

NOT_FINITE = "the loss is not finite in the end"
"""An outcome of inputs that are not scaled."""

FAR = 100.0
"""How many times the largest output, and 1, an error is where targets are not scaled; our own choice."""

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


class UnscaledInput(Detector):
    """Inputs of large numbers, and training that suffers from them."""

    slug = "input-unscaled"
    words = Words(
        says="Inputs are far from unit scale and go into the first layer as they are, or targets are, and the model "
        "does not learn.",
        example="Inputs are not scaled: self:input.input has mean 78 and standard deviation 96 and goes into a linear "
        "layer as it is, and the loss is no better than guessing.",
        threshold=f"standard deviation or |mean| above {WIDE:g} in every look, an affine layer that takes it with "
        f"nothing in between, and a loss that ends no lower than {MOVED:g} of its begin, or {AT_CHANCE:g} of that of "
        f"guessing, or is not finite; of targets, an error of {FAR:g} times the largest output, and above {FAR:g}, "
        "in a loss that has not fallen by a tenth",
        source="SageMaker's and UMLAUT's rules on inputs; the numbers are our own choice",
        guard="indices, inputs that are normalised in the model, and models that learn nevertheless, are left alone",
        repair="divide inputs by their scale (255 for bytes), or subtract their mean and divide by their standard "
        "deviation.",
    )
    explains = (
        "exploding", "diverged", "loss-flat", "learning-rate-too-high", "dead-units", "saturated", "loss-spike",
        "loss-noisy", "bad-init", "vanishing", "learning-rate-too-low", "clip-always-on", "batch-norm",
    )  # fmt: skip

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        targets = list(self._check_target(record))
        yield from targets
        if targets:
            return
        for name, listed in list_inputs(record).items():
            scale = [max(each.std, abs(each.value)) for each in listed]
            if not min(scale) > WIDE or not _is_taken_as_it_is(record.chains, listed[0]):
                continue
            outcome = describe_outcome(record)
            if outcome:
                yield self._describe(name, listed, outcome)

    def _check_target(self, record: Record) -> Iterator[Finding]:
        """Hold the error of a regression against what the model gives out, in a run whose loss has not fallen."""
        loss, training = _find_regression(record.chains), record.once(Training)
        output = _largest_outputs(record)
        if loss is None or not len(training.loss.values) or output is None or training.fell:
            return
        squared = name_of(loss) == "mse_loss"
        error = [float(np.sqrt(each)) if squared else float(each) for each in (training.initial, training.late)]
        if not min(error) > FAR * max(output, 1.0):
            return
        yield self.find(
            "warning",
            f"Targets are not scaled: outputs are within ±{output:.3g}, and they are off by {error[0]:.3g} in "
            f"{name_of(loss)}, so that the loss has hardly fallen ({training.initial:.3g} to {training.late:.3g})",
            site=loss.module,
            step=int(training.loss.steps[0]),
            last_step=record.last_step,
            line=loss.line,
            evidence=[
                Evidence("error at first", error[0], f"> {FAR:g} times the outputs, and {FAR:g}"),
                Evidence("error at the end", error[1], f"> {FAR:g} times the outputs, and {FAR:g}"),
                Evidence("largest output", output),
            ],
            precondition=["the loss is a mean of errors", "it has not fallen by a tenth"],
            refute="training goes as badly with targets of unit scale",
            repair="subtract the targets' mean and divide them by their standard deviation, and undo that on outputs.",
        )

    def _describe(self, name: str, listed: Sequence[Input], outcome: str) -> Finding:
        first = listed[0]
        return self.find(
            "critical" if outcome == NOT_FINITE else "warning",
            f"Inputs are not scaled: {name} has mean {first.value:.3g} and standard deviation {first.std:.3g} "
            f"({first.min:.3g} … {first.max:.3g}) and goes into a layer as it is, and {outcome}",
            site=name,
            step=first.step,
            last_step=listed[-1].step,
            evidence=[
                Evidence("standard deviation", first.std, f"> {WIDE:g}, or the mean"),
                Evidence("mean", first.value, f"> {WIDE:g} in magnitude, or the standard deviation"),
            ],
            precondition=["no normalisation stands before the first layer", "training does suffer"],
            refute="training goes as badly with inputs of unit scale",
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


def _is_taken_as_it_is(chains: Sequence[Chain], given: Input) -> bool:
    """Tell whether an affine layer takes what the model was given, in another shape at most."""
    for chain in chains[:1]:
        for number in range(len(chain)):
            if chain.name(number) in AFFINE and chain.maker(number, 0, VIEWS) < 0:
                shape = chain.taken(number) or ()
                if math.prod(shape) == math.prod(given.shape):
                    return True
    return False


def describe_outcome(record: Record) -> str:
    """Say what is wrong with the loss in the end; empty where the model has learned something."""
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


def guessing_loss(record: Record) -> float:
    """The cross entropy of guessing among the classes; 0 where the loss is another."""
    for chain in record.chains[:1]:
        for number in chain.losses():
            shape = chain.taken(number) or ()
            if chain.name(number) in ("cross_entropy", "nll_loss") and len(shape) > 1:
                return math.log(shape[1])
    return 0.0


class ConstantInput(Detector):
    """Inputs that hold one number, or the same sample over and over."""

    slug = "input-constant"
    words = Words(
        says="All elements of the model's input are the same number, so there is nothing to learn from.",
        example="The input self:input.input holds nothing but 0 in all 7 batches that were looked at.",
        threshold="a smallest element that is the largest, in every look, of every input of the model",
        source="SageMaker Debugger's rule on constant input",
        guard="initial states, masks and learned constants beside a real input are left alone; so is a model that is "
        "called several times a step (solvers, decoders), for only its first call is looked at",
        repair="look at what the dataset returns, before it is batched.",
    )
    explains = (
        "loss-flat",
        "learning-rate-too-low",
        "vanishing",
        "dead-units",
        "missing-gradient",
        "not-updated",
        "batch-norm",
    )

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        found = list_inputs(record)
        constant = {name: all(each.min == each.max for each in listed) for name, listed in found.items()}
        if not all(constant.values()) or len(record.inputs) != len(found):
            return
        name, listed = next(iter(found.items()))
        if len(listed) < 2:
            return
        if _is_called_again(record):
            raise CannotTell("a model is called several times a step, and its first call alone was looked at")
        yield self.find(
            "warning",
            f"The input {name} holds nothing but {listed[0].min:g} in all {len(listed)} batches that were looked at",
            site=name,
            span=listed,
            evidence=[
                Evidence("smallest element", listed[0].min, "= the largest"),
                Evidence("largest element", listed[0].max),
            ],
            precondition=["no other input of the model varies"],
            refute="the model is meant to learn a constant",
        )


def _is_called_again(record: Record) -> bool:
    """Tell whether at most steps a model is called several times with gradients before a backward pass."""
    again = steps = 0
    for _, calls in record.calls_by_step():
        first = next((place for place, call in enumerate(calls) if call.name == "backward"), len(calls))
        forwards = [call.about for call in calls[:first] if call.name == "forward" and call.details.get("grad")]
        again += len(forwards) > len(set(forwards))
        steps += bool(forwards)
    return again > steps / 2
