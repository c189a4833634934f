"""What can be told of the update behind which a loss has jumped: its rate, its largest part, what went first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from retrograd.core.amounts import count_of
from retrograd.core.runs.findings import Evidence
from retrograd.explaining.findings.numbers import divide
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import Training
from retrograd.explaining.findings.update_norms import UpdateNorms, add_up

LEFT = 10.0
"""Times its largest number so far, beyond which a site has left its range."""

STRETCH = 20
"""Recorded steps on each side of an update in which that is looked for."""


def tell_jump(record: Record, step: int) -> Iterator[Evidence]:
    """What is known of the update of a step.

    Args:
        record: what it reads.
        step: of the update, which is behind the forward and the backward of that step.
    """
    training = record.once(Training)
    if (rate := training.rates.get(step) if training.rates else training.rate) is not None:
        yield Evidence(f"learning rate at step {step}", rate)
    with suppress(CannotTell):  # no update was recorded
        yield Evidence(f"largest part of the update of step {step}", _find_largest(training.updates, step))
    yield Evidence("first site beyond its range", _find_first(record, step), f"> {LEFT:g} × its largest before")


def _find_largest(updates: UpdateNorms, step: int) -> str:
    for norms in updates.norms():
        for column in np.flatnonzero(norms.steps == step):
            delta = np.nan_to_num(norms.delta[:, column])
            whole = add_up(norms.delta[:, [column]])[0]
            return f"{updates.sites[delta.argmax()].value}, ‖Δw‖ {delta.max():.3g} of {whole:.3g} in all"
    return "not known: it was not recorded"


def _find_first(record: Record, step: int) -> str:
    """The first site behind an update that is not finite, or far beyond its range up to then, in words."""
    reach = STRETCH * record.once(Training).stride
    sites = [str(site) for site in record.sites if site.quantity != "update"]
    part = record.history.since(step - reach, step + reach)
    sizes, lost = (part.matrix(name, sites) for name in ("abs_max", "nonfinite"))
    before = (sizes.steps >= step - reach) & (sizes.steps <= step)
    behind = (sizes.steps > step) & (sizes.steps <= step + reach)
    if not before.any() or not behind.any():
        return f"not known: no site was recorded both up to step {step} and behind it"
    largest = np.fmax.reduce(sizes.values[:, before], axis=1, keepdims=True)
    times, is_lost = divide(sizes.values[:, behind], largest), lost.values[:, behind] > 0
    found, steps = np.argwhere(((times > LEFT) | is_lost).T), sizes.steps[behind]  # in order of execution
    if not len(found):
        return f"none of {count_of(len(sites), 'site')} up to step {steps[-1]}"
    column, line = found[0]
    several = int((found[:, 0] == column).sum())
    if several > 1 and not {steps[column] - 1} & {step, *steps}:
        return f"not known: {several} sites are by step {steps[column]}, and the step before was not recorded"
    how = "not finite" if is_lost[line, column] else f"{times[line, column]:.3g} times its largest before"
    return f"{sites[line]} at step {steps[column]}, {how}"
