"""Updates that are never made, or made before there is a gradient."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.core.history.facts import Call
from retrograd.core.runs.findings import Finding, Severity
from retrograd.explaining.findings.division import is_divided_by
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.gradients import ParameterGradients
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.updates import (
    BY_HAND,
    HABIT,
    Update,
    by_optimizer,
    count_passes,
    list_cleared_passes,
)

family = Family(__name__)

PASSES = 5
"""Backward passes after which a program that never updates is not a probe of gradients."""

WITHOUT_OPTIMIZER = 20
"""Backward passes that it takes where no optimizer was ever seen, as in a program that looks at gradients alone."""

SOME = "The optimizer"
"""One whose name is not known."""


@family.detector("optimizer-never-steps")
def never_steps(record: Record, entry: Entry) -> Iterator[Finding]:
    """Gradients are found, and never used."""
    calls = record.calls
    if not calls:
        raise CannotTell("no calls were recorded")
    passes = [call for call in calls if call.name == "backward"]
    by_hand = "no parameter was changed by hand either" if record.is_changed is False else ""
    is_updated = any(call.name in ("step", "scaler.step") for call in calls) or _may_change(record)
    named = _name_optimizer(calls)
    if is_updated:
        yield from _find_others(entry, calls)
    elif len(passes) >= (PASSES if named else WITHOUT_OPTIMIZER) and _trains(calls):
        yield _describe_never_steps(entry, named, passes, passes[0].line, "critical" if named else "warning", by_hand)


def _find_others(entry: Entry, calls: list[Call]) -> Iterator[Finding]:
    """Optimizers whose gradients are cleared again and again beside others that step."""
    stepping = {call.about for call in calls if call.name in ("step", "scaler.step")}
    waiting, passes = "", dict[str, list[Call]]()
    for call in calls:
        if call.name == "zero_grad" and "optimizer" in call.details:
            waiting = call.about
        elif call.name == "backward" and waiting and waiting not in stepping:
            passes.setdefault(waiting, []).append(call)
    for optimizer, several in passes.items():
        if stepping and len(several) >= PASSES:
            checked = "gradients are cleared for it again and again, and other optimizers step"
            yield _describe_never_steps(entry, optimizer, several, several[0].line, "critical", checked)


def _describe_never_steps(
    entry: Entry, named: str, passes: list[Call], line: str, severity: Severity, checked: str
) -> Finding:
    return entry.finding(
        f"{named or 'No optimizer'} {'never' if named else 'ever'} makes an update: backward ran {len(passes)} "
        "times, and its step was not called once",
        severity=severity,
        site="" if named == SOME else named,
        step=passes[0].step if passes else None,
        last_step=passes[-1].step if passes else None,
        line=line,
        evidence=[
            ("backward passes", len(passes), f"≥ {PASSES if named else WITHOUT_OPTIMIZER}"),
            ("updates", 0, "none"),
        ],
        checked=[checked] if checked else [],
    )


def _may_change(record: Record) -> bool:
    """Check whether parameters are changed by hand; that counts steps, too, as clearing of gradients does."""
    return (record.last_step or 0) > 0 if record.is_changed is None else record.is_changed


def _name_optimizer(calls: list[Call]) -> str:
    """An optimizer that gradients are cleared for, or a scheduler that goes on."""
    return next((call.about for call in calls if call.name == "zero_grad" and "optimizer" in call.details), "") or next(
        (SOME for call in calls if call.name in ("scheduler.step", "scaler.update")), ""
    )


def _trains(calls: list[Call]) -> bool:
    return any(
        call.details.get("training", True) for call in calls if call.name == "forward" and call.details.get("grad")
    )


@family.detector("backward-never-called")
def backward_never_called(record: Record, entry: Entry) -> Iterator[Finding]:
    """Updates are made, and there never is a gradient."""
    updates = [update for update in record.updates if update.optimizer != BY_HAND]
    if not updates:
        raise CannotTell("no update was recorded")
    if any(call.name in ("backward", "grad") for call in record.calls):
        for optimizer, several in by_optimizer(updates).items():
            if len(several) >= 3 and is_without_gradient(record, optimizer) and all(map(_is_early, several)):
                why = "no backward pass for it ever ran: none of its parameters has ever had a"
                yield _describe_backward_never_called(
                    entry, several, why, ["parameters of other optimizers had gradients"]
                )
    elif len(updates) >= 3 and not record.is_changed:
        checked = ["no parameter was changed"] if record.is_changed is False else []
        yield _describe_backward_never_called(entry, updates, "no backward pass ever ran: parameters have no", checked)


def _describe_backward_never_called(entry: Entry, updates: list[Update], why: str, checked: list[str]) -> Finding:
    return entry.finding(
        f"{updates[0].optimizer} makes {len(updates)} updates, and {why} gradient to be updated by",
        site=updates[0].optimizer,
        step=0,
        last_step=updates[-1].step,
        line=updates[0].call.line,
        evidence=[("updates", len(updates), "≥ 3"), ("backward passes", 0, "none")],
        checked=checked,
    )


def is_without_gradient(record: Record, optimizer: str) -> bool:
    """Check whether none of an optimizer's parameters ever had a gradient, and parameters of another one had some."""
    gradients = record.once(ParameterGradients)
    made = record.optimizers.get(optimizer)
    names = set(made.parameters) if made else set()
    if any(gradients.may_have_had_one(name) or gradients.is_unseen(name) for name in names):
        return False
    return bool(names) and not names & gradients.steps.keys() and bool(gradients.held & gradients.steps.keys())


@family.detector("step-before-backward")
def step_before_backward(record: Record, entry: Entry) -> Iterator[Finding]:
    """The update is made before the gradient of its batch is found."""
    for optimizer, updates in record.updates_by_program().items():
        early = [update for update in updates if _is_early(update)]
        has_passes = any(update.named("backward") for update in updates)
        is_meant = optimizer != BY_HAND and not is_without_gradient(record, optimizer)
        if is_meant and has_passes and len(early) >= max(3, HABIT * len(updates)):
            yield _describe_step_before_backward(entry, optimizer, early, len(updates))
        elif record.status == "finished" and len(record.optimizers) == 1 and _is_ahead(record.calls, updates):
            yield entry.finding(
                f"{optimizer} steps at the start of each round, from the gradient of the round before: the first "
                "update has none, and the last gradient is never used",
                case="ahead",
                site=optimizer,
                step=updates[0].step,
                line=updates[0].call.line,
                evidence=[("updates", len(updates), "one fewer than backward passes")],
            )


def _describe_step_before_backward(entry: Entry, optimizer: str, early: list[Update], among: int) -> Finding:
    return entry.finding(
        f"{optimizer} steps before backward: {len(early)} of {among} updates come between the forward and the "
        "backward pass of their batch",
        site=optimizer,
        span=early,
        line=early[0].call.line,
        evidence=[("updates before their backward pass", len(early), f"≥ {HABIT:.0%} of {among}")],
    )


def _is_ahead(calls: list[Call], updates: list[Update]) -> bool:
    """Check whether the program ends with a backward pass without an update, and its step stands before its forward."""
    passes = [call for call in calls if call.name == "backward"]
    forwards = [call for update in updates for call in update.named("forward") if call.details.get("grad")]
    lines = {call.line for call in (*passes, *forwards)}
    file, _, number = updates[0].call.line.rpartition(":")
    places = [int(line.rpartition(":")[2]) for line in lines if line.rpartition(":")[0] == file]
    is_left = len(passes) == len(updates) + 1 >= 4 and len({call.line for call in passes}) == 1
    return is_left and len(places) == len(lines) and number.isdigit() and int(number) < min(places, default=0)


def _is_early(update: Update) -> bool:
    for call in reversed(update.before):
        if call.name in ("backward", "grad"):
            return False
        if call.name == "forward" and call.details.get("grad"):
            return True
    return False


@family.detector("step-too-seldom")
def step_too_seldom(record: Record, entry: Entry) -> Iterator[Finding]:
    """Gradients are cleared before an update has used them."""
    found = record.updates_by_program()
    if len(by_optimizer(record.updates)) > 1:
        raise CannotTell("several optimizers take turns")
    for optimizer, updates in found.items():
        lost = [call for update in updates for call in list_cleared_passes(update, record.optimizers)]
        passes = sum(len(update.named("backward")) for update in updates)
        if lost and is_divided_by(record, count_passes(updates)):
            raise CannotTell("the loss is divided by the passes of an update: they are meant to be accumulated")
        if len(lost) >= max(2 * len(updates), passes / 2) > 0:
            yield entry.finding(
                f"Most gradients are thrown away: of {passes} backward passes, {len(lost)} are followed by "
                f"zero_grad before {optimizer} steps",
                site=optimizer,
                span=updates,
                line=updates[0].call.line,
                evidence=[("passes whose gradients are cleared unused", len(lost), f"≥ half of {passes}")],
            )
