"""Losses that diverged, jumped, or did not fall. These detectors claim no cause."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from retrograd.core.history.matrix import Curve
from retrograd.core.runs.findings import Evidence, Finding
from retrograd.explaining.findings.chain import Chain, count, is_float
from retrograd.explaining.findings.detector import Detector, Words
from retrograd.explaining.findings.numbers import median
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import ROSE, FloatArray, IntArray, Training

SPIKE = 6.0
"""Robust standard deviations of the logarithm of the loss above its running median."""

WINDOW = 128
"""Steps that a running median looks back."""

FAR = 10.0
"""Factor from which on it is more than harder data may make."""

MOST = 5000
"""Losses that are looked at one by one."""

FLAT = 50
"""Losses that it takes to call a curve flat."""


class Diverged(Detector):
    """A loss that ends far above where it began."""

    slug = "diverged"
    is_of_losses = True
    words = Words(
        says="The loss ends far above what it was, or is not finite any more.",
        example="The loss has diverged: from 0.652 it went to 6.33, and has been above 1.96 since step 2.",
        threshold=f"The median of the last fifth is at least {ROSE:g} times (a warning from {FAR:g} times on) the "
        "first loss, or the median of the first tenth if that is lower; or one of them is not finite.",
        source="Megatron-LM holds 10 times the largest of the first 100; 3 times is measured by us.",
        guard="Losses below zero, models that train against each other, and fewer than 10 losses are not judged.",
        repair="Look at what else was found; with nothing, go back to the step before and train at a tenth of the "
        "rate.",
    )
    explains = ("loss-flat", "loss-noisy")

    def check(self, record: Record) -> Iterator[Finding]:
        """Compare the end with what went before."""
        training = record.once(Training)
        training.need_loss(10)
        steps, loss = training.loss
        if not training.lowest >= 0:
            return
        lowest = min(training.initial, training.early) if np.isfinite(training.early) else training.initial
        late = training.late
        if late < ROSE * lowest or not lowest > 0:
            return
        above = ~(loss < ROSE * lowest)
        last_below = np.flatnonzero(~above[: int(np.flatnonzero(above)[-1])])
        since = int(steps[last_below[-1] + 1]) if len(last_below) else int(steps[0])
        end = f"it went to {late:.3g}" if np.isfinite(late) else "it went to NaN or infinity"
        yield self.find(
            "note" if late < FAR * lowest else "warning",
            f"The loss has diverged: from {lowest:.3g} {end}, and it has been above {ROSE * lowest:.3g} since step "
            f"{since}.",
            step=since,
            last_step=record.last_step,
            evidence=[Evidence("loss at the end", late, f"≥ {ROSE:g} × {lowest:.3g}")],
            precondition=["one model is trained, by a loss that is never below zero"],
            refute="the loss of another part of the data is meant, or its scale was changed",
        )


class LossSpike(Detector):
    """A loss that jumps from one step to the next, and does not come back, or takes long."""

    slug = "loss-spike"
    is_of_losses = True
    words = Words(
        says="The loss jumped out of its noise from one step to the next though the update between was a usual one.",
        example="The loss jumped from 0.021 to 1.3e+06 at step 70 though the update before was a usual one, and did "
        "not come back: look at the batch of that step.",
        threshold=f"Log of the loss more than {SPIKE:g} robust standard deviations above the running median of "
        f"{WINDOW} steps, and more than twice it, for at least 5 steps in a row; a warning from 10 times on, where "
        "it does not come back.",
        source="OLMo-core's skip_step_optimizer (6 σ over 128 steps); robust and in logarithms by us.",
        guard="A spike of fewer than 5 steps is healthy; so is one of a loss that is small beside its begin; the "
        "update before must be no larger than usual, else it is not the data.",
        repair="Look at the batch of that step, and clip the norm of the gradient.",
    )
    explains = (
        "diverged", "exploding", "loss-flat", "loss-noisy", "dead-units", "saturated", "learning-rate-too-high",
        "overflow-headroom",
    )  # fmt: skip

    def check(self, record: Record) -> Iterator[Finding]:
        """Look for stretches above the running median."""
        training = record.once(Training)
        training.need_loss(40)
        steps, loss = thin(training.loss)
        if not training.lowest > 0:
            return
        high = find_spikes(loss) & ~(loss < 0.1 * training.initial)
        start, length = longest_stretch(high)
        if length < 5:
            return
        stays = start + length >= len(loss) or not training.late < ROSE * training.early
        before, during = float(np.median(loss[max(0, start - WINDOW) : start])), loss[start : start + length]
        is_sudden = bool(during[0] > 10 * before) and self._was_usual(record, int(steps[start]))
        if stays and not is_sudden:
            return  # a divergence, which another says
        how = "did not come back" if stays else f"took {length} steps to come back"
        data = " though the update before was a usual one" if is_sudden else ""
        yield self.find(
            "warning" if stays else "note",
            f"The loss jumped from {before:.3g} to {during[0]:.3g} at step {steps[start]}{data}, and {how}"
            f"{': look at the batch of that step' if data else ''}.",
            step=int(steps[start]),
            last_step=int(steps[start + length - 1]),
            evidence=[
                Evidence("loss over its running median", float(during[0] / before), "> 10"),
                Evidence("steps above the noise", length, "≥ 5"),
            ],
            precondition=["the loss is positive, and one model is trained"],
            refute="the loss of these steps is of other data",
        )

    @staticmethod
    def _was_usual(record: Record, step: int) -> bool:
        updates = record.once(Training).updates
        before = updates.ratio[updates.steps < step]
        return len(before) > 10 and bool(before[-1] < 5 * median(before)) and bool(before[-1] < 0.1)


class LossFlat(Detector):
    """A loss that does not fall."""

    slug = "loss-flat"
    is_of_losses = True
    words = Words(
        says="The loss has not fallen; why, this does not say.",
        example="The loss has not fallen in 100 steps: 0.694 at first, 0.692 at the end.",
        threshold=f"The median of the last fifth is not below 0.98 of that of the first tenth, over at least {FLAT} "
        "losses.",
        source="AutoTrainer and SageMaker Debugger; 0.98 and 50 are ours.",
        guard="A loss that is a small part of its first value, or that fell within the first tenth; losses below zero, "
        "and models that train against each other; losses of which a part is made of what the model itself has given, "
        "cut off (codebooks, teachers, values), or weighted by numbers of the program's (returns, masks).",
        repair="Look at what else was found; see whether the model can learn a single batch by heart.",
    )

    def check(self, record: Record) -> Iterator[Finding]:
        """Compare the end with the begin."""
        training = record.once(Training)
        training.need_loss(FLAT)
        early, late = training.early, training.late
        lowest = training.lowest
        if not (np.isfinite(late) and early > 0 and lowest > 0) or late < 0.98 * early or lowest < 0.3 * early:
            return
        if np.median(training.loss.values[:3]) - early > max(0.02 * early, 2 * training.noise):
            return  # it has fallen at once
        for chain in record.chains[:1]:
            _need_fixed_aim(chain)
        yield self.find(
            "note",
            f"The loss has not fallen in {len(training.loss.steps)} steps: {early:.3g} at first, {late:.3g} at the "
            "end.",
            evidence=[Evidence("loss at the end over that at first", late / early, "≥ 0.98")],
            precondition=["one model is trained, by a loss that is never below zero"],
            refute="it falls over more steps",
        )


def _need_fixed_aim(chain: Chain) -> None:
    """Make sure that a loss need fall where the model gets better.

    Raises:
        CannotTell: a part of it is made of what the model gave, or weighted by what the program gives.
    """
    for number in sorted(chain.of_loss):
        operation = chain.listed[number]
        if operation.cuts and is_float((*operation.makes, "")[0]):
            raise CannotTell(f"the loss holds what the model itself has given, cut off by `{operation.name}`")
        if chain.name(number) == "mul" and number not in chain.of_outputs and _weighs(chain, number):
            raise CannotTell("the loss weights its elements by numbers of the program's, such as returns")


def _weighs(chain: Chain, number: int) -> bool:
    """Tell whether a product has several elements, of which one factor depends on the model and the other does not."""
    operands = chain.listed[number].operands[:2]
    learned = [each in chain.behind_outputs or each in chain.of_outputs for each in operands]
    if len(operands) < 2 or sum(learned) != 1:
        return False
    return count(chain.taken(number, learned.index(False)) or ()) > 1 and count(chain.made(number)) > 1


class LossNoisy(Detector):
    """A loss that swings far more than it falls."""

    slug = "loss-noisy"
    is_of_losses = True
    words = Words(
        says="The loss swings from step to step by more than it is.",
        example="The loss swings by 1.4 from step to step, around 0.8: batches of 2.",
        threshold="Robust standard deviation of a step's difference above the median of the last half.",
        source="Measured by us: 34 healthy runs stay below 0.5, where they have not converged.",
        guard="A loss that has fallen to a tenth of its begin, or below zero, is not judged.",
        repair="Use larger batches, or look at the mean over an epoch.",
    )

    def check(self, record: Record) -> Iterator[Finding]:
        """Compare differences with the level."""
        training = record.once(Training)
        training.need_loss(FLAT)
        half = training.loss.values[len(training.loss.values) // 2 :]
        level = float(np.median(half))
        if not np.isfinite(half).all() or np.min(half) < 0 or level < 0.1 * training.initial or training.fell:
            return
        swing = float(1.4826 * np.median(np.abs(np.diff(half))) / np.sqrt(2))
        if swing <= level:
            return
        yield self.find(
            "note",
            f"The loss swings by {swing:.2g} from step to step, around {level:.2g}.",
            evidence=[Evidence("swing over level", swing / level, "> 1")],
            precondition=["the loss has not fallen"],
            refute="the mean over an epoch falls",
        )


def thin(curve: Curve) -> Curve:
    """A curve of at most :data:`MOST` numbers: the medians of stretches of equal length, at their first steps."""
    length = -(-len(curve.values) // MOST)
    if length <= 1:
        return curve
    whole = len(curve.values) // length * length
    return Curve(curve.steps[:whole:length], np.median(curve.values[:whole].reshape(-1, length), axis=1))


def find_spikes(loss: FloatArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Where the loss is out of the noise of what went before; the first 20 never are."""
    logs = np.log(np.where(np.isfinite(loss) & (loss > 0), loss, np.nan))
    high = ~np.isfinite(loss)
    usual: list[float] = []
    for place, value in enumerate(logs.tolist()):
        recent = usual[-WINDOW:]
        if len(usual) >= 20 and not value <= min(recent) + np.log(2):  # else it is below twice the median, too
            middle = np.median(recent)
            spread = max(1.4826 * float(np.median(np.abs(np.array(recent) - middle))), 0.05)
            high[place] |= bool(value > middle + max(SPIKE * spread, np.log(2)))
        if not high[place]:
            usual.append(value)
    return high


def longest_stretch(high: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """Begin and length of the longest run of true values."""
    edges: IntArray = np.flatnonzero(np.diff(np.concatenate(([0], high.astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(np.argmax(lengths))
    return int(edges[2 * longest]), int(lengths[longest])
