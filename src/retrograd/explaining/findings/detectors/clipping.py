"""Clipping where there is nothing to clip, and clipping of nearly everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from retrograd.core.amounts import count_of
from retrograd.core.history.facts import Call
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.numbers import divide, median
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import Training, is_adaptive, number
from retrograd.explaining.findings.updates import CLIPS, HABIT, Update

family = Family(__name__)

LEFT = 0.05
"""Share of the gradient that clipping leaves of it, below which it takes too much."""


def list_clipped(record: Record) -> dict[str, list[Update]]:
    """The updates of each optimizer in whose run something is clipped.

    Raises:
        CannotTell: there is none, or it is not known whose gradients are clipped.
    """
    if not any(call.name in CLIPS for call in record.calls):
        raise CannotTell("nothing is clipped")
    found = record.updates_by_program()
    if len(found) > 1:
        raise CannotTell("several optimizers take turns, and whose gradients are clipped is not known")
    return found


def _find_misplaced(record: Record, entry: Entry, when: str, *, is_early: bool) -> Iterator[Finding]:
    """Find clipping where there is nothing to clip yet, or any more; where ``is_early`` of the first update too."""
    for optimizer, updates in list_clipped(record).items():
        meant = [update for update in updates if update.named("backward")]
        wrong = [update for update in meant if _is_misplaced(update)]
        if wrong and len(wrong) >= HABIT * len(meant) - 1 and wrong[0].is_first == is_early:
            call = wrong[0].named(*CLIPS)[0]
            yield entry.finding(
                f"Clipping has no effect: {call.name} is called {when}",
                site=optimizer,
                step=call.step,
                last_step=wrong[-1].step,
                line=call.line,
                evidence=[("updates that are clipped at the wrong time", len(wrong), f"≥ {HABIT:.0%} of {len(meant)}")],
            )


@family.detector("clip-after-step")
def clip_after_step(record: Record, entry: Entry) -> Iterator[Finding]:
    """Clipping behind the update."""
    return _find_misplaced(record, entry, "after the update, too late for it", is_early=False)


@family.detector("clip-before-backward")
def clip_before_backward(record: Record, entry: Entry) -> Iterator[Finding]:
    """Clipping ahead of backward."""
    return _find_misplaced(record, entry, "before backward, when there is no gradient yet", is_early=True)


def _is_misplaced(update: Update) -> bool:
    """Check whether something is clipped, but nothing behind the last backward pass."""
    behind = update.after_last("backward")
    return bool(update.named(*CLIPS)) and not any(call.name in CLIPS for call in behind)


@family.detector("clip-before-unscale")
def clip_before_unscale(record: Record, entry: Entry) -> Iterator[Finding]:
    """Clipping of gradients that are still scaled."""
    scales = [call.value for call in record.called("scaler.update") if call.value > 1]
    if not scales:
        raise CannotTell("no loss is scaled")
    for optimizer, updates in list_clipped(record).items():
        wrong = [call for update in updates if (call := _find_scaled(update)) is not None]
        if wrong and len(wrong) >= HABIT * len(updates):
            bound = wrong[0].details.get("max_norm", wrong[0].details.get("clip_value"))
            yield entry.finding(
                f"Gradients are clipped while still scaled: {wrong[0].name} to {bound:g} is called without "
                f"scaler.unscale_ before it, at a scale of {scales[0]:g}",
                site=optimizer,
                span=wrong,
                line=wrong[0].line,
                evidence=[
                    ("scale", scales[0], "> 1"),
                    ("updates clipped while scaled", len(wrong), f"≥ {HABIT:.0%} of {len(updates)}"),
                ],
            )


def _find_scaled(update: Update) -> Call | None:
    """The call that clips behind the last backward pass, if nothing has unscaled before it."""
    for call in update.after_last("backward"):
        if call.name == "scaler.unscale_":
            return None
        if call.name in CLIPS:
            return call
    return None


@family.detector("clip-other-parameters")
def clip_other_parameters(record: Record, entry: Entry) -> Iterator[Finding]:
    """Clipping that is given nothing."""
    for optimizer, updates in list_clipped(record).items():
        calls = [call for update in updates for call in update.after_last("backward") if call.name in CLIPS]
        empty = [call for call in calls if call.details.get("parameters") == 0 or call.value == 0.0]
        if empty and empty[0].details.get("parameters") and not _has_gradients(record):
            raise CannotTell("all gradients are zero")
        if empty and len(empty) >= HABIT * len(calls) and record.is_changed:
            given = Counter(call.details.get("parameters") for call in empty).most_common(1)[0][0]
            some = "no parameters" if given == 0 else f"{given} parameters that have no gradient"
            yield entry.finding(
                f"Clipping has no effect: {empty[0].name} is given {some}, and {optimizer} updates others",
                site=optimizer,
                span=empty,
                line=empty[0].line,
                evidence=[("calls that clip nothing", len(empty), f"≥ {HABIT:.0%} of {len(calls)}")],
            )


def _has_gradients(record: Record) -> bool:
    """Check whether gradients of parameters are other than zero at most steps."""
    gradients = record.numbers([(site,) for site in record.of_kind("parameter", "grad")], ("abs_max",))
    return any((found.of["abs_max"] > 0).mean() > HABIT for (found,) in gradients if len(found.steps))


@family.detector("clip-always-on")
def clip_always_on(record: Record, entry: Entry) -> Iterator[Finding]:
    """A clipping threshold far below the usual norm."""
    calls = [call for call in record.called("clip_grad_norm_") if np.isfinite(call.value)]
    if len(calls) < 20:
        raise CannotTell(f"{count_of(len(calls), 'call')} of clip_grad_norm_ recorded, and it takes 20")
    norms = np.array([call.value for call in calls])
    bounds = np.array([number(call.details.get("max_norm")) or np.nan for call in calls])
    left = divide(bounds, norms)
    usual = median(left)
    if not usual < LEFT or (left < LEFT).mean() < 0.8:
        return
    training = record.once(Training)
    scales = not is_adaptive(training.optimizer)
    costs = not training.fell and scales
    tail = ": the learning rate is in truth that much smaller" if scales else ""
    yield entry.finding(
        f"clip_grad_norm_(max_norm={bounds[0]:g}) leaves {usual:.2g} of the gradient at {(left < LEFT).sum()} of "
        f"{len(calls)} steps{tail}.",
        severity="warning" if costs else "note",
        span=calls,
        line=calls[0].line,
        evidence=[
            ("max_norm over the norm, median", usual, f"< {LEFT:g}"),
            ("share of steps", float((left < LEFT).mean()), "≥ 0.8"),
        ],
        checked=[
            "the loss falls" if training.fell else "the loss has not fallen",
            f"updates are {'' if scales else 'not '}in proportion to gradients",
        ],
    )
