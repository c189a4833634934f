"""Clipping where there is nothing to clip, and clipping of nearly everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from retrograd.core.amounts import count_of
from retrograd.core.history.facts import Call
from retrograd.core.runs.findings import Evidence, Finding
from retrograd.explaining.findings.detector import Detector, Words
from retrograd.explaining.findings.numbers import divide, median
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import Training, is_adaptive, number
from retrograd.explaining.findings.updates import CLIPS, HABIT, Update

LEFT = 0.05
"""Share of the gradient that clipping leaves of it, below which it takes too much."""

UNCLIPPED = ("exploding", "loss-spike", "diverged", "clip-always-on", "loss-noisy")
"""Symptoms of gradients that are not clipped."""


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


class MisplacedClipping(Detector):
    """Clipping where there is nothing to clip yet, or any more.

    Attributes:
        when: said of it.
        is_early: the first update is concerned, too.
    """

    when: ClassVar[str]
    is_early: ClassVar[bool]
    explains = UNCLIPPED

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        for optimizer, updates in list_clipped(record).items():
            meant = [update for update in updates if update.named("backward")]
            wrong = [update for update in meant if _is_misplaced(update)]
            if wrong and len(wrong) >= HABIT * len(meant) - 1 and wrong[0].is_first == self.is_early:
                yield self._describe(optimizer, wrong, len(meant))

    def _describe(self, optimizer: str, wrong: list[Update], among: int) -> Finding:
        call = wrong[0].named(*CLIPS)[0]
        return self.find(
            "warning",
            f"Clipping has no effect: {call.name} is called {self.when}",
            site=optimizer,
            step=call.step,
            last_step=wrong[-1].step,
            line=call.line,
            evidence=[Evidence("updates that are clipped at the wrong time", len(wrong), f"≥ {HABIT:.0%} of {among}")],
            precondition=["no clipping between the last backward pass and the update"],
            refute="gradients are clipped by other means between backward and the update",
        )


class ClipAfterStep(MisplacedClipping):
    """Clipping behind the update."""

    slug = "clip-after-step"
    when = "after the update, too late for it"
    is_early = False
    words = Words(
        says="Gradients are clipped when the update has used them already.",
        example="Clipping has no effect: clip_grad_norm_ is called after the update, too late for it.",
        threshold="a call of clip_grad_norm_ or clip_grad_value_ after the update, and none between the last backward "
        "pass and the update, before 80 % of the updates",
        source="our own choice",
        guard="several optimizers, and those with a closure, are left out; so is clipping of each micro-batch",
        repair="clip between loss.backward() and optimizer.step().",
    )


class ClipBeforeBackward(MisplacedClipping):
    """Clipping ahead of backward."""

    slug = "clip-before-backward"
    when = "before backward, when there is no gradient yet"
    is_early = True
    words = Words(
        says="Gradients are clipped before backward has found them.",
        example="Clipping has no effect: clip_grad_norm_ is called before backward, when there is no gradient yet.",
        threshold="a call of clip_grad_norm_ or clip_grad_value_ before backward, and none between the last backward "
        "pass and the update, before 80 % of the updates, the first one among them",
        source="our own choice",
        guard="several optimizers, and those with a closure, are left out; so is clipping of each micro-batch",
        repair="clip between loss.backward() and optimizer.step().",
    )


def _is_misplaced(update: Update) -> bool:
    """Tell whether something is clipped, but nothing behind the last backward pass."""
    behind = update.after_last("backward")
    return bool(update.named(*CLIPS)) and not any(call.name in CLIPS for call in behind)


class ClipBeforeUnscale(Detector):
    """Clipping of gradients that are still scaled."""

    slug = "clip-before-unscale"
    words = Words(
        says="Gradients are clipped while they are still multiplied by the loss scale, so the bound is that many "
        "times lower.",
        example="Gradients are clipped while still scaled: clip_grad_norm_ to 1 is called without scaler.unscale_ "
        "before it, at a scale of 65536.",
        threshold="a scale above 1, and no scaler.unscale_ between backward and clipping, before 80 % of the updates",
        source="torch's examples of automatic mixed precision: unscale before clipping",
        guard="a scale of 1, or a scaler that is off, is left alone",
        repair="call scaler.unscale_(optimizer) before clipping.",
    )
    explains = ("clip-always-on", "loss-flat", "learning-rate-too-low", "underflow")

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        scales = [call.value for call in record.called("scaler.update") if call.value > 1]
        if not scales:
            raise CannotTell("no loss is scaled")
        for optimizer, updates in list_clipped(record).items():
            wrong = [call for update in updates if (call := _find_scaled(update)) is not None]
            if wrong and len(wrong) >= HABIT * len(updates):
                bound = wrong[0].details.get("max_norm", wrong[0].details.get("clip_value"))
                yield self.find(
                    "warning",
                    f"Gradients are clipped while still scaled: {wrong[0].name} to {bound:g} is called without "
                    f"scaler.unscale_ before it, at a scale of {scales[0]:g}",
                    site=optimizer,
                    span=wrong,
                    line=wrong[0].line,
                    evidence=[
                        Evidence("scale", scales[0], "> 1"),
                        Evidence("updates clipped while scaled", len(wrong), f"≥ {HABIT:.0%} of {len(updates)}"),
                    ],
                    precondition=["no scaler.unscale_ between backward and clipping"],
                    refute="the bound was chosen for scaled gradients",
                )


def _find_scaled(update: Update) -> Call | None:
    """The call that clips behind the last backward pass, if nothing has unscaled before it."""
    for call in update.after_last("backward"):
        if call.name == "scaler.unscale_":
            return None
        if call.name in CLIPS:
            return call
    return None


class ClipOtherParameters(Detector):
    """Clipping that is given nothing."""

    slug = "clip-other-parameters"
    words = Words(
        says="Clipping is given no parameters, or some that have no gradient, so what is updated is not clipped.",
        example="Clipping has no effect: clip_grad_norm_ is given 0 parameters, and SGD#1 updates 4.",
        threshold="no parameters, or a norm of 0, at 80 % of the calls after backward, while updates change parameters",
        source="our own choice",
        guard="a part of the parameters may be clipped on purpose, and is left alone",
        repair="pass list(model.parameters()): a generator is used up by the first who reads it.",
    )
    explains = UNCLIPPED

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        for optimizer, updates in list_clipped(record).items():
            calls = [call for update in updates for call in update.after_last("backward") if call.name in CLIPS]
            empty = [call for call in calls if call.details.get("parameters") == 0 or call.value == 0.0]
            if empty and empty[0].details.get("parameters") and not _has_gradients(record):
                raise CannotTell("all gradients are zero")
            if empty and len(empty) >= HABIT * len(calls) and record.is_changed:
                given = Counter(call.details.get("parameters") for call in empty).most_common(1)[0][0]
                some = "no parameters" if given == 0 else f"{given} parameters that have no gradient"
                yield self.find(
                    "warning",
                    f"Clipping has no effect: {empty[0].name} is given {some}, and {optimizer} updates others",
                    site=optimizer,
                    span=empty,
                    line=empty[0].line,
                    evidence=[Evidence("calls that clip nothing", len(empty), f"≥ {HABIT:.0%} of {len(calls)}")],
                    precondition=["updates change parameters"],
                    refute="gradients are clipped by other means",
                )


def _has_gradients(record: Record) -> bool:
    """Tell whether gradients of parameters are other than zero at most steps."""
    gradients = record.numbers([(site,) for site in record.of_kind("parameter", "grad")], ("abs_max",))
    return any((found.of["abs_max"] > 0).mean() > HABIT for (found,) in gradients if len(found.steps))


class ClipAlwaysOn(Detector):
    """A clipping threshold far below the usual norm."""

    slug = "clip-always-on"
    words = Words(
        says="The gradient is clipped to a small part of itself at nearly every step, which slows SGD down.",
        example="clip_grad_norm_(max_norm=0.0001) leaves 0.0003 of the gradient at 100 of 100 steps: the learning "
        "rate is in truth that much smaller.",
        threshold=f"max_norm below {LEFT:g} of the median norm, at 80 % of at least 20 steps.",
        source="OPT clips at 0.3 to 1 of the usual norm; 80 % and 0.05 are ours.",
        guard="A note where the loss falls, or where the optimizer divides by the gradient (Adam), for there it "
        "costs little.",
        repair="Set max_norm near the usual norm of the gradient, and the learning rate with it.",
    )
    explains = ("loss-flat", "learning-rate-too-low", "not-updated", "bf16-update-lost")

    def check(self, record: Record) -> Iterator[Finding]:
        """Hold the threshold against the norms."""
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
        yield self.find(
            "warning" if costs else "note",
            f"clip_grad_norm_(max_norm={bounds[0]:g}) leaves {usual:.2g} of the gradient at {(left < LEFT).sum()} of "
            f"{len(calls)} steps{tail}.",
            span=calls,
            line=calls[0].line,
            evidence=[
                Evidence("max_norm over the norm, median", usual, f"< {LEFT:g}"),
                Evidence("share of steps", float((left < LEFT).mean()), "≥ 0.8"),
            ],
            precondition=[
                "the loss falls" if training.fell else "the loss has not fallen",
                f"updates are {'' if scales else 'not '}in proportion to gradients",
            ],
            refute="with a larger max_norm the loss falls no faster",
        )
