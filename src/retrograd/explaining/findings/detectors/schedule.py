"""Learning rates over a run, and the schedulers that set them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from retrograd.core.amounts import list_names
from retrograd.core.history.facts import Call
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.jumps import tell_jump
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import as_list
from retrograd.explaining.findings.updates import Update, by_optimizer

family = Family(__name__)

FloatArray = npt.NDArray[np.float64]

OF_EPOCHS = ("StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "ReduceLROnPlateau", "MultiplicativeLR")
"""Schedulers that are meant for epochs as a rule."""


MANY_EPOCHS = 3
"""Stretches of equally many updates that show at which end of an epoch a scheduler is stepped; our own choice."""

FEWEST = 10
"""Updates at a collapsed learning rate that matter."""

UNLEARNED = 0.3
"""Share of the first loss above which a run has not converged; our own choice."""


def list_rates(record: Record) -> dict[str, tuple[list[Update], FloatArray]]:
    """List the updates of each optimizer, with the highest learning rate among its groups at each.

    Raises:
        CannotTell: none was recorded.
    """
    found = {}
    for optimizer, updates in by_optimizer(record.updates).items():
        known = [update for update in updates if update.call.details.get("lr")]
        if known:
            found[optimizer] = known, np.array([max(update.call.details["lr"]) for update in known], np.float64)
    if not found:
        raise CannotTell("no learning rate was recorded")
    return found


def list_schedule(record: Record) -> list[Call]:
    """The calls of schedulers."""
    return record.called("scheduler.step")


def loss_between(record: Record, first: int, last: int) -> float:
    """The mean of the finite losses of some steps; NaN where there is none."""
    steps, values = record.loss
    chosen = values[(steps >= first) & (steps <= last) & np.isfinite(values)]
    return float(chosen.mean()) if len(chosen) else float("nan")


def is_unlearned(record: Record, step: int) -> bool:
    """Check whether the loss at a step is still high, held against that of the first steps."""
    steps, _ = record.loss
    if not len(steps):
        return True
    begin = loss_between(record, int(steps[0]), int(steps[0]) + 2)
    then = loss_between(record, step - 4, step)
    return not np.isfinite(begin) or begin <= 0 or not then < UNLEARNED * begin


@family.detector("lr-zero")
def rate_is_zero(record: Record, entry: Entry) -> Iterator[Finding]:
    """The learning rate is 0, or falls to next to nothing long before the end."""
    schedule = list_schedule(record)
    for optimizer, (updates, rates) in list_rates(record).items():
        if not rates.any():
            yield _describe_zero(entry, optimizer, updates, schedule, record)
            continue
        yield from _find_groups(entry, optimizer, updates, record)
        since = find_collapse(rates)
        is_nothing = bool(since) and not rates[max(since, len(rates) // 2) :].any()
        is_of_epochs = _is_per_update(schedule, updates) and is_unlearned(record, updates[since].step)
        if since and not is_of_epochs and (is_nothing or is_unlearned(record, updates[since].step)):
            is_high = is_unlearned(record, updates[since].step)
            yield describe_collapse(entry, optimizer, updates, rates, since, schedule, is_high=is_high)


def _find_groups(entry: Entry, optimizer: str, updates: list[Update], record: Record) -> Iterator[Finding]:
    """Groups whose learning rate is 0 all the time, while that of others is not."""
    listed = [update.call.details["lr"] for update in updates]
    made = record.optimizers.get(optimizer)
    for number, group in enumerate(made.groups if made else ()):
        names = [str(name) for name in group.get("parameters", ())]
        if names and all(len(rates) > number and rates[number] == 0 for rates in listed):
            yield entry.finding(
                f"The learning rate of {list_names(names, 1)} is 0 at all {len(updates)} updates of {optimizer}, "
                "while that of its other groups is not",
                case="groups",
                site=names[0],
                span=updates,
                line=made.line if made else "",
                evidence=[("highest learning rate of the group", 0.0, "0")],
            )


def _describe_zero(
    entry: Entry, optimizer: str, updates: list[Update], schedule: list[Call], record: Record
) -> Finding:
    whose = f" ({schedule[0].about})" if schedule else ""
    made = record.optimizers.get(optimizer)
    return entry.finding(
        f"The learning rate of {optimizer} is 0 at all {len(updates)} updates{whose}, so nothing is learned",
        case="zero",
        site=optimizer,
        span=updates,
        line=schedule[0].line if schedule else made.line if made else updates[0].call.line,
        evidence=[("highest learning rate", 0.0, "0")],
    )


def find_collapse(rates: FloatArray) -> int:
    """The first update from which on the learning rate is next to nothing, though the end is far; 0 for none."""
    for share, latest in ((1e-2, 0.5), (1e-3, 0.67)):
        since = int(np.flatnonzero(rates >= share * rates.max())[-1]) + 1
        if since <= latest * len(rates) and len(rates) - since >= FEWEST:
            return since
    return 0


def _is_per_update(schedule: list[Call], updates: list[Update]) -> bool:
    """Check whether a scheduler that is meant for epochs goes on with every update."""
    return any(call.about in OF_EPOCHS for call in schedule) and len(schedule) >= 0.9 * len(updates)


def describe_collapse(
    entry: Entry,
    optimizer: str,
    updates: list[Update],
    rates: FloatArray,
    since: int,
    schedule: list[Call],
    *,
    is_high: bool,
) -> Finding:
    """A finding that says when the learning rate fell, and by whom."""
    by = f" by {schedule[0].about}" if schedule else ""
    how = ", which is stepped once per update" if _is_per_update(schedule, updates) else ""
    return entry.finding(
        f"The learning rate of {optimizer} has fallen from {rates.max():.3g} to {rates[since]:.3g} after {since} of "
        f"{len(rates)} updates{by}{how}: hardly anything is learned after that",
        site=optimizer,
        step=updates[since].step,
        last_step=updates[-1].step,
        line=schedule[0].line if schedule else updates[since].call.line,
        evidence=[
            ("learning rate at its highest", float(rates.max())),
            ("learning rate at the end", float(rates[-1]), "< 0.01 of it for the whole second half"),
            ("first update at which it was next to nothing", since, f"of {len(rates)}"),
        ],
        checked=[
            f"the loss was not below {UNLEARNED:g} of its first value by then" if is_high else "the rate is 0 exactly"
        ],
        refute="the loss had reached the lowest value that this model and these data allow",
    )


@family.detector("scheduler-per-step")
def scheduler_per_step(record: Record, entry: Entry) -> Iterator[Finding]:
    """A scheduler whose lengths are in epochs goes on with every update."""
    schedule = list_schedule(record)
    if not schedule:
        raise CannotTell("no scheduler was stepped")
    for optimizer, (updates, rates) in list_rates(record).items():
        if not _is_per_update(schedule, updates) or not rates.any():
            continue
        since, waves = find_collapse(rates), count_waves(rates)
        if since and is_unlearned(record, updates[since].step):
            yield describe_collapse(entry, optimizer, updates, rates, since, schedule, is_high=True)
        elif waves >= 2 and schedule[0].about == "CosineAnnealingLR":
            yield _describe_waves(entry, optimizer, updates, rates, waves, schedule[0])


def _describe_waves(
    entry: Entry, optimizer: str, updates: list[Update], rates: FloatArray, waves: int, call: Call
) -> Finding:
    return entry.finding(
        f"The learning rate of {optimizer} goes up and down {waves} times between {rates.min():.3g} and "
        f"{rates.max():.3g}: {call.about} is stepped once per update, about {len(rates) // (2 * waves)} updates "
        "are its T_max",
        site=optimizer,
        span=updates,
        line=call.line,
        evidence=[("full waves of the learning rate", waves, "≥ 2")],
    )


def count_waves(rates: FloatArray) -> int:
    """Count how often the learning rate falls to the bottom of its range and comes back to its top."""
    low, high = rates.min(), rates.max()
    marks = [rate > (low + high) / 2 for rate in rates if not 0.2 < (rate - low) / max(high - low, 1e-300) < 0.8]
    return sum(is_up and not was_up for was_up, is_up in pairwise(marks))


@family.detector("scheduler-before-step")
def scheduler_before_step(record: Record, entry: Entry) -> Iterator[Finding]:
    """The scheduler goes on before the optimizer has made its first update."""
    calls = record.called("step", "scheduler.step")
    first = next((call for call in calls if call.name == "step"), None)
    schedule = list_schedule(record)
    if first is None or not schedule:
        raise CannotTell("no scheduler, or no update, was seen")
    is_ahead = calls[0].name == "scheduler.step"
    is_skipped = record.status == "finished" and _begins_periods(calls) and _has_moved(record, first)
    if not is_ahead and not is_skipped:
        return
    yield entry.finding(
        f"{schedule[0].about} is stepped before the updates of its epoch, so the first learning rate of its "
        "schedule is skipped",
        site=first.about,
        step=schedule[0].step,
        line=schedule[0].line,
        evidence=[("first of both", calls[0].name), ("last of both", calls[-1].name, "step")],
        checked=[
            "the first call of both is the scheduler's"
            if is_ahead
            else "it is stepped ahead of each of several equal stretches of updates, the last one too"
        ],
    )


def _begins_periods(calls: list[Call]) -> bool:
    """Check whether a scheduler is stepped ahead of each of at least three equal stretches of updates.

    Its first step may have come before anything was recorded.
    """
    if len({call.about for call in calls if call.name == "scheduler.step"}) != 1 or len({c.about for c in calls}) != 2:
        return False
    stretches = "".join("s" if call.name == "step" else "|" for call in calls).split("|")
    return len(stretches) > MANY_EPOCHS and len(stretches[-1]) > 0 and len(set(stretches)) == 1


def _has_moved(record: Record, first: Call) -> bool:
    """Check whether the first update is not made with the learning rate that the schedule begins from."""
    made = record.optimizers.get(first.about)
    begun = [group.get("initial_lr") for group in made.groups] if made else []
    return bool(begun) and None not in begun and begun != as_list(first.details.get("lr"))


@family.detector("lr-jump")
def rate_jump(record: Record, entry: Entry) -> Iterator[Finding]:
    """The learning rate rises at once, far above what it was, and the loss with it."""
    schedule = list_schedule(record)
    for optimizer, (updates, rates) in list_rates(record).items():
        if len(rates) < 7:
            continue
        highest = np.maximum.accumulate(rates)[:-1]
        jumps = np.flatnonzero((highest > 0) & (rates[1:] >= 10 * highest)) + 1
        for place in jumps[jumps > 5][:1]:
            step = updates[place].step
            before, behind = loss_between(record, step - 10, step - 1), loss_between(record, step + 1, step + 10)
            if not behind <= 1.5 * before:
                line = schedule[0].line if schedule else updates[place].call.line
                yield entry.finding(
                    f"The learning rate of {optimizer} jumps from {rates[place - 1]:.3g} to {rates[place]:.3g} at "
                    f"step {step}, and the loss goes from {before:.3g} to {behind:.3g}",
                    site=optimizer,
                    step=step,
                    line=line,
                    evidence=[
                        ("rise of the learning rate", float(rates[place] / rates[place - 1]), "≥ 10"),
                        ("loss after it, by that before", behind / before if before else behind, "> 1.5"),
                        *tell_jump(record, step),
                    ],
                )
