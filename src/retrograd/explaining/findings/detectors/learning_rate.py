"""Learning rates that are too high or too low, and parameters that no update changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from retrograd.core.amounts import list_names
from retrograd.core.history.facts import OptimizerMade
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.births import Births
from retrograd.explaining.findings.coverage import Coverage
from retrograd.explaining.findings.detectors.units import DEAD, list_dead
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.gradients import ParameterGradients
from retrograd.explaining.findings.jumps import tell_jump
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import MOVED, ROSE, Training, is_adaptive
from retrograd.explaining.findings.update_norms import UpdateNorms

family = Family(__name__)

LARGE = 0.1
"""‖Δw‖ / ‖w‖ of a step beyond which it may have thrown training off; 1e-3 is usual."""

HUGE = 0.5
"""‖Δw‖ / ‖w‖ beyond which it is said without a rise where the loss is none the better."""

LARGE_LOSS = 1000.0
"""A loss that is so large before any update has large gradients by itself: its scale may be what is wrong."""

LASTED = 3
"""Steps at which the loss is up, or updates are large, that it takes to be more than a single bad batch."""

MINUTE = 1e-2
"""Share of their norm by which weights have moved in a whole run, when it has hardly begun to train."""

SMALL = {False: 1e-4, True: 5e-6}
"""Learning rates below which a run is not likely to train: plain, and of optimizers that divide by the gradient."""

FEWEST = 5
"""Updates that it takes to say that they leave a parameter as it is."""

PUT_BACK = 3
"""Samples of a parameter, each behind an update that changed it, that it takes to say that it is put back."""


@family.detector("learning-rate-too-high", of_losses=True)
def learning_rate_too_high(record: Record, entry: Entry) -> Iterator[Finding]:
    """Steps so large that they throw the weights about."""
    training = record.once(Training)
    training.need_loss(4)
    updates = training.updates
    before = baseline(record, updates)
    rise = _find_rise(record, before)
    since = rise or _find_death(record)
    first = None if since is None or training.late < MOVED * before else largest_before(updates, since)
    checked = ["units of a layer that lived before have been dead since" if rise is None else "the loss rose after it"]
    checked.append(f"the loss does not end below {MOVED:g} of what it was before")
    if first is None:
        first = _find_huge(record, before)
        checked = [f"several updates were of {HUGE:g} times the norm of the weights or more"]
    if first is not None:
        yield _describe_learning_rate_too_high(entry, record, *first, before, checked)


def _find_rise(record: Record, before: float) -> int | None:
    """The first step after a large update at which the loss is far above what it was, if that lasted."""
    training = record.once(Training)
    steps, loss = training.loss
    since = first_large(training.updates)
    if since is None or not before > 0:
        return None
    bound = min(ROSE * before, max(1.5 * before, before + 6 * np.nan_to_num(training.noise, nan=np.inf)))
    is_up = np.isfinite(loss) & (loss >= bound) if record.once(Births).is_sudden else ~(loss < bound)
    risen = np.flatnonzero(is_up & (steps > since))
    lasted = max(len(risen), int((training.updates.finite_ratio > LARGE).sum())) * training.stride
    return int(steps[risen[0]]) if len(risen) and lasted >= LASTED else None


def _find_huge(record: Record, before: float) -> tuple[int, float] | None:
    """An update of half of the weights or more, and a loss that is none the better, or was far up for long."""
    training, updates = record.once(Training), record.once(Training).updates
    place = np.flatnonzero(updates.finite_ratio >= HUGE)
    up = int((training.loss.values > 10 * before).sum()) * training.stride
    no_better = training.late >= before or (up >= 5 and training.late >= 0.5 * before)
    if len(place) * training.stride < 2 or not no_better or len(training.loss.values) < 10 or before <= 0:
        return None
    return int(updates.steps[place[0]]), float(updates.finite_ratio[place].max())


def _find_death(record: Record) -> int | None:
    """The step since which most units of a layer have been dead, if they lived before."""
    found = [dead for dead in record.once(list_dead) if dead.share > DEAD and dead.since > record.steps[0]]
    return min((dead.since for dead in found), default=None)


def _describe_learning_rate_too_high(
    entry: Entry, record: Record, step: int, ratio: float, before: float, checked: list[str]
) -> Finding:
    training = record.once(Training)
    loss, late, rate = training.loss.values, training.late, training.rates.get(step, training.rate)
    finite = loss[np.isfinite(loss)]
    named = "The learning rate" if rate is None else f"The learning rate of {rate:.3g}"
    rise = f"the loss rose from {before:.3g} to {finite.max():.3g}"
    rise = rise if finite.max() > ROSE / 2 * before else f"the loss was {before:.3g} before"
    end = f"ended at {late:.3g}" if np.isfinite(late) else "is no longer finite"
    is_large = before >= LARGE_LOSS
    meant = f" for a loss of {before:.3g}" if is_large else ""
    changed = f"at step {step} an update changed the weights by {ratio:.2g} times their norm"
    if not training.updates.finite_ratio[training.updates.steps == step].max(initial=0.0) >= ratio:
        changed = f"from step {step} on updates changed the weights by up to {ratio:.2g} times their norm"
    return entry.finding(
        f"{named} is too high{meant}: {changed}, {rise} and {end}.",
        step=step,
        last_step=record.last_step,
        line=record.optimizer_line,
        evidence=[
            ("‖Δw‖/‖w‖", ratio, f"> {LARGE:g}"),
            *tell_jump(record, step),
            ("loss before", before),
            ("largest finite loss", float(finite.max()), f"> {ROSE:g} × before, or > 1.5 × and 6 × noise"),
            ("loss at the end", late, f"not < {MOVED:g} × before"),
        ],
        checked=checked,
        repair=f"Look why the loss is so large; its gradients are, too. {entry.words.repair}"
        if is_large
        else _find_peak(training),
    )


def _find_peak(training: Training) -> str:
    """The repair where a schedule warms the rate up; empty where none does."""
    rates = training.rates
    first, peak = (rates[min(rates)], max(rates.values())) if rates else (0.0, 0.0)
    if not peak > 2 * first:
        return ""
    is_named = any("max_lr" in group for _, group in training.groups())
    named = "the schedule's `max_lr`" if is_named else "the rate that it leads to"
    return f"A schedule warms the rate up, from {first:.3g} to {peak:.3g}: divide {named} by 10."


def first_large(updates: UpdateNorms) -> int | None:
    """The step of the first large update."""
    large = updates.steps[updates.finite_ratio > LARGE]
    return int(large[0]) if len(large) else None


def baseline(record: Record, updates: UpdateNorms) -> float:
    """The loss before the first large update: the median of those so far, or the first one."""
    steps, loss = record.once(Training).loss
    first = first_large(updates)
    until = loss if first is None else loss[: np.searchsorted(steps, first, "right")]
    until = until[np.isfinite(until)][-20:]
    return float(np.median(until)) if len(until) else float("nan")


def largest_before(updates: UpdateNorms, step: int) -> tuple[int, float] | None:
    """The first large update of the stretch of them that ends before a step: its step, and ‖Δw‖/‖w‖ of the largest."""
    before = np.flatnonzero((updates.steps < step) & (updates.steps >= step - 20))
    ratio = updates.finite_ratio[before]
    large = before[ratio > LARGE]
    if not len(large):
        return None
    return int(updates.steps[large[0]]), float(ratio.max())


@family.detector("learning-rate-too-low", of_losses=True)
def learning_rate_too_low(record: Record, entry: Entry) -> Iterator[Finding]:
    """Steps so small that nothing comes of them."""
    training = record.once(Training)
    training.need_loss(5)
    updates = training.updates
    rate = training.rate
    if rate is None:
        raise CannotTell("no learning rate was recorded")
    coverage = record.once(Coverage)
    moved, made = float(np.nansum(updates.ratio)) * training.stride, f"{len(updates.steps)} updates"
    if not coverage.is_whole:
        moved, made = _estimate_move(updates, coverage), f"{len(coverage.made)} updates, {len(updates.steps)} recorded,"
    skipped = len(training.loss.steps) * training.stride < 20 or training.fell or not moved < MINUTE
    if skipped or rate == 0 or rate >= SMALL[is_adaptive(training.optimizer)] or _warms_up(training.rates):
        return
    yield entry.finding(
        f"The learning rate of {rate:.2g} is too low: {made} moved the weights by "
        f"{'' if coverage.is_whole else 'about '}{moved:.1g} of their norm in all, and the loss stayed at "
        f"{training.late:.3g}.",
        step=int(updates.steps[0]),
        last_step=record.last_step,
        line=record.optimizer_line,
        evidence=[
            ("Σ ‖Δw‖/‖w‖", moved, f"< {MINUTE:g}"),
            ("learning rate", rate, f"< {SMALL[is_adaptive(training.optimizer)]:g}"),
            ("loss at first", training.early),
            ("loss at the end", training.late, "has not fallen by a tenth"),
        ],
    )


def _estimate_move(updates: UpdateNorms, coverage: Coverage) -> float:
    """Σ ‖Δw‖/‖w‖ of all updates, of which those that were not recorded are taken to be as the recorded one before."""
    places = np.searchsorted(coverage.made, [*updates.steps, coverage.made[-1] + 1])
    return float(np.nansum(updates.ratio * np.maximum(np.diff(places), 1)))


def _warms_up(rates: dict[int, float]) -> bool:
    told = [rates[step] for step in sorted(rates)]
    return len(told) > 1 and told[-1] > 2 * told[0]


@family.detector("not-updated")
def not_updated(record: Record, entry: Entry) -> Iterator[Finding]:
    """Parameters that updates leave as they are, though they have a gradient."""
    if len(record.optimizers) > 1 or record.once(Training).is_contest:
        raise CannotTell("several optimizers update in turn, each with gradients that the others leave")
    found = record.once(UpdateNorms).stillness.find_still(FEWEST)
    stuck = {name: often for name, often in found.items() if not _is_meant(record, name)}
    if not record.once(Coverage).is_whole:  # a step that was not recorded has changed them
        stuck = {name: often for name, often in stuck.items() if not record.once(ParameterGradients).has_changed(name)}
    put_back = _find_put_back(record)
    if put_back:
        yield _describe_put_back(entry, record, put_back)
    elif stuck:
        yield _describe_not_updated(entry, record, list(stuck), min(stuck.values()))


def _is_meant(record: Record, name: str) -> bool:
    groups = [group for _, group in record.once(Training).groups() if name in group.get("parameters", ())]
    return any(group.get("lr") == 0 for group in groups)


def _describe_not_updated(entry: Entry, record: Record, names: list[str], steps: int) -> Finding:
    verb = "have gradients and" if len(names) > 1 else "has a gradient and"
    return entry.finding(
        f"{list_names(names, 1)} {verb} an update at each of {steps} "
        f"{'steps' if record.once(Coverage).is_whole else 'recorded steps'}, and did not change.",
        site=names[0],
        step=int(record.once(Training).updates.steps[0]),
        last_step=record.last_step,
        line=record.line_of(names[0]) or record.optimizer_line,
        evidence=[("updates of zero with a gradient that is not", steps, f"≥ {FEWEST}, all of them")],
        repair="Look at hooks of the optimizer, and at its step: there the gradient, or the update, is taken away.",
    )


def _find_put_back(record: Record) -> list[str]:
    """Parameters that updates change, and that are bit for bit the same at all looks from the first update on.

    A look is taken before the update of its step, and counts if an update came between it and the look before.
    """
    updates = record.once(Training).updates
    told = {str(site.value): line for line, site in enumerate(updates.sites) if updates.told[line] >= FEWEST}
    if record.is_staged:  # a whole model beside the stages has parameters that only other ranks train
        trained = {
            name for made in record.of(OptimizerMade) if made.rank == record.first_rank for name in made.parameters
        }
        told = {name: line for name, line in told.items() if name in trained}
    found = []
    for name, listed in record.looks.items():
        looks = {look.step: look.digest for look in listed if look.digest and look.rank == record.first_rank}
        steps = sorted(looks)
        last = {looks[step] for step in steps[-PUT_BACK - 1 :]}
        if name not in told or len(steps) <= PUT_BACK or len(last) > 1:
            continue
        behind = np.flatnonzero(updates.tell_spans(told[name], steps)) + 1
        if len(behind) >= PUT_BACK and len({looks[step] for step in steps[behind[0] - 1 :]}) == 1:
            found.append(name)
    return found


def _describe_put_back(entry: Entry, record: Record, names: list[str]) -> Finding:
    is_whole = record.once(Coverage).is_whole
    how = "each update and are the same again at the next step" if is_whole else "updates and are the same at each look"
    return entry.finding(
        f"{list_names(names, 1)} are changed by {how}: something writes old values back.",
        case="put-back",
        site=names[0],
        step=int(record.once(Training).updates.steps[0]),
        last_step=record.last_step,
        line=record.line_of(names[0]),
        evidence=[("parameters that are the same behind updates", len(names), f"bit for bit, at ≥ {PUT_BACK} looks")],
    )
