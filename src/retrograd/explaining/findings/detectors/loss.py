"""Losses that diverged, jumped, or did not fall. These detectors claim no cause."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from retrograd.core.history.curve import Curve
from retrograd.core.history.weights_facts import Load
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.chain import Chain, count, is_float
from retrograd.explaining.findings.coverage import IN_FULL, Coverage
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.jumps import tell_jump
from retrograd.explaining.findings.numbers import median
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import ROSE, FloatArray, IntArray, Training

family = Family(__name__)

SPIKE = 6.0
"""Robust standard deviations of the logarithm of the loss above its running median."""

WINDOW = 128
"""Steps that a running median looks back."""

FAR = 10.0
"""Factor from which on it is more than harder data may make."""

SHORT, SEPARATE = 20, 30
"""Losses from which on their noise is known well enough to tell a first one from it; and a tenth of them."""

TAIL = 3.0
"""How often as far as the lowest twentieth of the losses a first one lies below them that is no noise."""

MOST = 5000
"""Losses that are looked at one by one."""

FLAT = 50
"""Losses that it takes to call a curve flat."""


@family.detector("diverged", of_losses=True)
def diverged(record: Record, entry: Entry) -> Iterator[Finding]:
    """A loss that ends far above where it began."""
    training = record.once(Training)
    training.need_loss(10)
    steps, loss = training.loss
    if not training.lowest >= 0:
        return
    if not _has_diverged(training):
        return
    lowest, late = _find_start(training), training.late
    above = ~(loss < ROSE * lowest)
    last_below = np.flatnonzero(~above[: int(np.flatnonzero(above)[-1])])
    since = int(steps[last_below[-1] + 1]) if len(last_below) else int(steps[0])
    start = record.once(Coverage).tell_since(since, int(steps[last_below[-1]]) if len(last_below) else None)
    end = f"it went to {late:.3g}" if np.isfinite(late) else "it went to NaN or infinity"
    yield entry.finding(
        f"The loss has diverged: from {lowest:.3g} {end}, and it has been above {ROSE * lowest:.3g} {start}.",
        severity="note" if late < FAR * lowest else "warning",
        step=since,
        last_step=record.last_step,
        evidence=[("loss at the end", late, f"≥ {ROSE:g} × {lowest:.3g}")],
    )


def _find_start(training: Training) -> float:
    return min(training.initial, training.early) if np.isfinite(training.early) else training.initial


def _has_diverged(training: Training) -> bool:
    lowest, late = _find_start(training), training.late
    return lowest > 0 and not late < ROSE * lowest and bool(np.isnan(late) or _is_above_noise(training))


def _is_above_noise(training: Training) -> bool:
    """Check whether losses end so high that noise around one level is no reason.

    Either those of the last fifth lie above those of the first tenth as a whole, or the first one is as far below as
    noise never is: where one is out of twenty, three times as far.
    """
    loss, late = training.loss.values, training.late
    logs = np.log(loss[np.isfinite(loss) & (loss > 0)])
    count, rise = len(logs), float(np.log(late / training.initial))
    head, tail = logs[: max(3, count // 10)], logs[-max(3, count // 5) :]
    if count >= SEPARATE and np.quantile(tail, 0.1) - np.quantile(head, 0.9) >= np.log(ROSE):
        return True
    rest = logs[-max(count // 2, min(count - 1, SHORT - 1)) :]
    depth = float(np.log(late) - np.quantile(rest, 0.05, method="lower"))
    is_out = rise >= max(np.log(ROSE if count >= SHORT else FAR**2), TAIL * depth)
    return is_out or bool(rise >= np.log(FAR**4) and logs[0] <= logs.min())


@family.detector("loss-spike", of_losses=True)
def loss_spike(record: Record, entry: Entry) -> Iterator[Finding]:
    """A loss that jumps from one step to the next, and does not come back, or takes long."""
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
    coverage = record.once(Coverage)
    last, first = int(steps[max(start - 1, 0)]), int(steps[start])
    if not coverage.is_whole:
        last, first = find_jump(training.loss, last, int(steps[min(start + 1, len(steps) - 1)]), 10 * before)
    usual = _was_usual(record, last, first) if during[0] > 10 * before else False
    if stays and not usual and (usual is not None or _has_diverged(training)):
        return  # a divergence, which another says
    how = "did not come back" if stays else f"took {steps[start + length] - steps[start]} steps to come back"
    data = " though the update before was a usual one" if usual else ""
    where = f"at step {first}" if coverage.is_whole or first - last < 2 else f"between steps {last} and {first}"
    end = "; the update before it was not recorded" if usual is None else ": look at the batch of that step"
    yield entry.finding(
        f"The loss jumped from {before:.3g} to {during[0]:.3g} {where}{data}, and {how}"
        f"{end if usual is not False else ''}.",
        severity="warning" if stays else "note",
        step=first,
        last_step=int(steps[start + length - 1]),
        evidence=[
            ("loss over its running median", float(during[0] / before), "> 10"),
            ("steps above the noise" if coverage.is_whole else "recorded losses above the noise", length, "≥ 5"),
            *tell_jump(record, last),
        ],
        repair=f"{IN_FULL[:1].upper()}{IN_FULL[1:]}: then it is known whether an update made it, or a batch."
        if usual is None
        else "",
    )


def find_jump(loss: Curve, last: int, end: int, bound: float) -> tuple[int, int]:
    """The two steps between which a loss first comes above a bound, of those from one step to another."""
    inside = np.flatnonzero((loss.steps > last) & (loss.steps <= end))
    high = inside[~(loss.values[inside] <= bound)]
    place = int(high[0] if len(high) else inside[0]) if len(inside) else len(loss.steps) - 1
    return int(loss.steps[max(place - 1, 0)]), int(loss.steps[place])


def _was_usual(record: Record, last: int, first: int) -> bool | None:
    """Check whether the update between two losses was no larger than others; None where it was not recorded."""
    updates, coverage = record.once(Training).updates, record.once(Coverage)
    before = updates.ratio[updates.steps < first]
    between = updates.ratio[(updates.steps >= last) & (updates.steps < first)]
    if not coverage.is_whole:
        if len(np.setdiff1d(coverage.list_updates(last, first), updates.steps)):
            return None
        return len(before) > 10 and len(between) > 0 and bool((between < min(5 * median(before), 0.1)).all())
    return len(before) > 10 and bool(before[-1] < 5 * median(before)) and bool(before[-1] < 0.1)


@family.detector("loss-flat", of_losses=True)
def loss_flat(record: Record, entry: Entry) -> Iterator[Finding]:
    """A loss that does not fall."""
    training = record.once(Training)
    training.need_loss(FLAT)
    early, late = training.early, training.late
    lowest = training.lowest
    if not (np.isfinite(late) and early > 0 and lowest > 0) or late < 0.98 * early or lowest < 0.3 * early:
        return
    if np.median(training.loss.values[:3]) - early > max(0.02 * early, 2 * training.noise):
        return  # it has fallen at once
    if any(load.value and load.of == "module" and load.step <= record.first_step for load in record.of(Load)):
        raise CannotTell("the weights were loaded, and may have been as good as they get")
    for chain in record.chains[:1]:
        _need_fixed_aim(chain)
    yield entry.finding(
        f"The loss has not fallen in {len(training.loss.steps)} steps: {early:.3g} at first, {late:.3g} at the end.",
        evidence=[("loss at the end over that at first", late / early, "≥ 0.98")],
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
    """Check whether a product has several elements, of which one factor depends on the model and the other does not."""
    operands = chain.listed[number].operands[:2]
    learned = [each in chain.behind_outputs or each in chain.of_outputs for each in operands]
    if len(operands) < 2 or sum(learned) != 1:
        return False
    return count(chain.taken(number, learned.index(False)) or ()) > 1 and count(chain.made(number)) > 1


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
