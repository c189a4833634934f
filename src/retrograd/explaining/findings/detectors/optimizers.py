"""Optimizers that are made again and again, or for parameters that are the model's no longer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from retrograd.core.amounts import count_of, list_names
from retrograd.core.groups import gather
from retrograd.core.history.facts import MOST_OPTIMIZERS, OptimizerMade
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.births import GREW
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, FloatArray, Record
from retrograd.explaining.findings.training import Training, as_list
from retrograd.explaining.findings.update_norms import TOLD, UpdateNorms
from retrograd.explaining.findings.updates import by_optimizer

family = Family(__name__)

FEWEST = 3
"""Optimizers from one line that are a habit; our own choice."""

FEWEST_STILL = 5
"""Updates that have changed a parameter, and then have not; our own choice."""


@family.detector("optimizer-made-anew")
def made_anew(record: Record, entry: Entry) -> Iterator[Finding]:
    """An optimizer is constructed anew for the same parameters."""
    record.need_optimizers()
    counted = {name: len(updates) for name, updates in by_optimizer(record.updates).items()}
    for same in _group_same(record).values():
        if len(same) < FEWEST:
            continue
        often = _count_updates([counted.get(each.name, 0) for each in same])
        is_set_back = _is_set_back(record, same)
        if is_set_back is None and often > 1:
            raise CannotTell("the weights were not recorded at the updates around those at which it was created again")
        if not is_set_back:
            yield _describe(entry, same, often)


def _describe(entry: Entry, same: Sequence[OptimizerMade], often: int) -> Finding:
    kind = same[0].type
    least = "at least " if any(map(_is_last, same)) else ""
    every = {0: "", 1: ", at every update"}.get(often, f", every {often} updates")
    has_state = kind != "SGD" or any(group.get("momentum") for group in same[0].groups)
    lost = "so its momentum and averages never last" if has_state else "which is harmless, for it remembers nothing"
    return entry.finding(
        f"{kind} is created again {least}{len(same)} times for the same parameters{every}, {lost}",
        severity="warning" if has_state else "note",
        site=same[0].name,
        step=same[1].step,
        last_step=same[-1].step,
        line=same[0].line,
        evidence=[
            ("optimizers for the same parameters", len(same), f"≥ {FEWEST}"),
            *([("updates of each", often)] if often else []),
        ],
    )


def _is_last(made: OptimizerMade) -> bool:
    """Check whether it is the last that was noted of its class: all later ones have its name."""
    return made.number >= MOST_OPTIMIZERS


def _count_updates(counted: Sequence[int]) -> int:
    """Updates of each of some optimizers, as most have; 0 where none is known to have ended.

    Of the last one that has updated more may follow, or not be written yet.
    """
    last = max((place for place, count in enumerate(counted) if count), default=0)
    return round(sum(counted[:last]) / last) or 1 if last else 0


def _is_set_back(record: Record, same: Sequence[OptimizerMade]) -> bool | None:
    """Check whether the weights were set to others before these optimizers, as for each fold of a cross-validation.

    None where no norms of the weights at two updates in a row are known.
    """
    steps = [made.step for made in same]
    losses = dict(zip(*(each.tolist() for each in record.loss), strict=True))
    moves = [
        (losses[step] - losses[step - 1], losses[step] - losses[steps[0]])
        for step in steps[1:]
        if {step, step - 1, steps[0]} <= losses.keys()
    ]
    if len(moves) > 1 and all(abs(since_first) < abs(since_last) for since_last, since_first in moves):
        return True
    if not record.of_kind("parameter", "update"):
        return None
    return _has_jumped(record.once(Training).updates, same[0].parameters, steps)


def _has_jumped(updates: UpdateNorms, names: Sequence[str], steps: Sequence[int]) -> bool | None:
    """Check by norms whether something other than updates changed the weights before one of these steps.

    Either all weights are what they were at the first of them, or one has moved by more than the update before could.
    """
    held = np.array([str(site.value) in names for site in updates.sites], np.bool_) & (updates.told > 0)
    wanted = [step - back for step in steps for back in (0, 1)]
    found: dict[int, tuple[FloatArray, FloatArray]] = {}
    for norms in updates.norms():
        for k in np.flatnonzero(np.isin(norms.steps, wanted)):
            found[int(norms.steps[k])] = norms.weight[held, k], norms.delta[held, k]
    known = [(*found[step - 1], found[step][0]) for step in steps[1:] if {step - 1, step} <= found.keys()]
    if not known or steps[0] not in found:
        return None
    first, _ = found[steps[0]]
    return any(
        bool(len(now) and (now == first).all()) or bool((abs(now - before) > delta + TOLD * (now + before)).any())
        for before, delta, now in known
    )


def _group_same(record: Record) -> dict[tuple[str, ...], list[OptimizerMade]]:
    """Optimizers by class, line and parameters."""
    known = (made for made in record.optimizers.values() if made.parameters and made.type)  # older versions do not tell
    return gather(((made.type, made.line, *made.parameters), made) for made in known)


@family.detector("optimizer-before-change")
def before_change(record: Record, entry: Entry) -> Iterator[Finding]:
    """An optimizer holds tensors that are no parameters of the model any more."""
    record.need_optimizers()
    foreign = [made for made in record.optimizers.values() if made.unknown]
    held = {name for made in record.optimizers.values() for name in made.parameters}
    alone = [str(site.value) for site in record.of_kind("parameter", "grad")]
    alone = [name for name in dict.fromkeys(alone) if name not in held and not name.startswith("optimizer/")]
    if not foreign or not alone:
        if len(record.optimizers) == 1:
            yield from _check_replaced(entry, record, *record.optimizers.values())
        return
    made = foreign[0]
    listed = list_names(alone, 2)
    yield entry.finding(
        f"{made.name} updates {count_of(made.unknown, 'tensor')} that no recorded model has, while {listed} "
        f"{'has' if len(alone) == 1 else 'have'} gradients and {'is' if len(alone) == 1 else 'are'} in no "
        "optimizer",
        site=alone[0],
        step=made.step,
        line=made.line,
        evidence=[
            ("tensors of no recorded model", made.unknown, "> 0"),
            ("parameters with a gradient in no optimizer", len(alone), "> 0"),
        ],
    )


def _check_replaced(entry: Entry, record: Record, made: OptimizerMade) -> Iterator[Finding]:
    """Find parameters that were updated at first, and later are not, while others of the optimizer are."""
    stopped = _find_stopped(record, made)
    if not stopped:
        return
    names, steps = list(stopped), record.once(UpdateNorms).stillness.steps
    step = int(steps[min(stopped.values())])
    listed = list_names(names, 2)
    verb = "has" if len(names) == 1 else "have"
    yield entry.finding(
        f"{listed} {verb} gradients and {verb} not been updated any more since step {step}, while {made.name} goes "
        f"on with others: it holds the parameters that stood there before, which were replaced",
        case="replaced",
        site=names[0],
        step=step,
        last_step=record.last_step,
        line=made.line,
        evidence=[
            ("parameters whose updates are 0 from then on", len(names), "> 0"),
            ("updates after that", int((steps >= step).sum()), f"≥ {FEWEST_STILL}"),
        ],
    )


def _find_stopped(record: Record, made: OptimizerMade) -> dict[str, int]:
    """Parameters of an optimizer that are not updated any more, each with the place of the first such update."""
    stopped = record.once(UpdateNorms).stillness.find_stopped(FEWEST_STILL)
    rates = [rate for call in record.called("step") for rate in as_list(call.details.get("lr"))]
    narrow = {each.name for each in record.parameters if each.dtype not in ("float32", "float64")}
    training = record.once(Training)
    if abs(training.late) > GREW * abs(training.initial):  # what Adam remembers of large gradients stops it
        return {}
    if any(rate == 0 for rate in rates) or not set(stopped) <= set(made.parameters):
        return {}
    return {name: place for name, place in stopped.items() if name not in narrow}
