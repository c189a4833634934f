"""Hyper-parameters of an optimizer that outweigh the gradient: decay, ε, momentum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.numbers import divide, median
from retrograd.explaining.findings.record import Record
from retrograd.explaining.findings.training import FloatArray, IntArray, Training, number
from retrograd.explaining.findings.update_norms import UpdateNorms, add_up

family = Family(__name__)

HALF = 0.5
"""Part of an update that decay makes, from which on it is spoken of."""

SHRUNK = 0.7
"""Share of its first value to which the norm of the weights has fallen by then."""

SHARE = 0.05
"""Share of what the rate would give, below which ε takes too much."""

LONG = 0.995
"""Momentum from which on it remembers longer than most runs last."""


@family.detector("weight-decay-dominates")
def weight_decay_dominates(record: Record, entry: Entry) -> Iterator[Finding]:
    """Weight decay that is stronger than the gradient."""
    training = record.once(Training)
    groups = [(name, group) for name, group in training.groups() if number(group.get("weight_decay"))]
    record.need_optimizers()
    if training.late < 0.2 * training.early or not len(training.updates.steps):
        return
    for name, group in groups:
        until = len(training.updates.steps) if training.lost is None else training.lost
        lines = _pick(training.updates, set(group.get("parameters", ())))
        if not len(lines) or until < 10:
            continue
        weights, changes = _add_up_norms(training.updates, lines)
        share = _measure_share(record, group, lines, weights, changes)
        weights = weights[:until]
        if share > HALF and np.min(weights) < SHRUNK * weights[0]:
            yield _describe_weight_decay_dominates(entry, record, name, group, share, weights)
            return


def _pick(updates: UpdateNorms, names: set[str]) -> IntArray:
    """Lines of weights of a group, small ones left out."""
    listed = [k for k, site in enumerate(updates.sites) if not names or str(site.value) in names]
    return np.array([k for k in listed if updates.elements[k] > 8 and updates.first_weights[k, 0] > 0], np.int64)


def _measure_share(
    record: Record, group: dict[str, Any], lines: IntArray, weights: FloatArray, changes: FloatArray
) -> float:
    """Measure the part of an update that decay makes, at the median of the first half of the steps."""
    updates = record.once(Training).updates
    decay, rate = number(group["weight_decay"]) or 0.0, number(group.get("lr")) or 0.0
    half = max(len(updates.steps) // 2, 5)
    norms = weights[:half]
    if group.get("decoupled_weight_decay"):
        return median(np.minimum(divide(rate * decay * norms, changes[:half]), 1.0))
    sites = [record.gradient_of(updates.sites[k].value) for k in lines]
    known = [str(site) for site in sites if site is not None]
    pieces = (add_up(matrix.values) for [matrix] in record.history.matrices(["l2"], known))
    gradients = np.concatenate(list(pieces))[:half]
    size = min(len(gradients), len(norms))
    return float(np.median(decay * norms[:size] / (decay * norms[:size] + gradients[:size])))


def _describe_weight_decay_dominates(
    entry: Entry, record: Record, name: str, group: dict[str, Any], share: float, weights: FloatArray
) -> Finding:
    updates = record.once(Training).updates
    low = int(np.argmin(weights))
    part = f"makes {share:.0%} of an update"
    if group.get("decoupled_weight_decay"):  # the gradient may pull the other way
        part = f"is {share:.0%} as large as an update" if share < 1 else "is as large as a whole update, or larger"
    return entry.finding(
        f"Weight decay outweighs the gradient: that of {name}, {group['weight_decay']:g}, {part}, and "
        f"the norm of the weights fell from {weights[0]:.3g} to {weights[low]:.3g} at step {updates.steps[low]}.",
        site=name,
        step=int(updates.steps[0]),
        last_step=record.last_step,
        line=record.optimizer_line,
        evidence=[
            ("decay beside the update, at most 1", share, f"> {HALF:g}"),
            ("norm of the weights over that at first", float(weights[low] / weights[0]), f"< {SHRUNK:g}"),
        ],
    )


def _add_up_norms(updates: UpdateNorms, lines: IntArray) -> tuple[FloatArray, FloatArray]:
    """‖w‖₂ and ‖Δw‖₂ of some parameters together, at each step."""
    found = [(add_up(norms.weight[lines]), add_up(norms.delta[lines])) for norms in updates.norms()]
    weights, changes = map(np.concatenate, zip(*found, strict=True))
    return weights, changes


@family.detector("adam-epsilon")
def adam_epsilon(record: Record, entry: Entry) -> Iterator[Finding]:
    """An ε that is larger than the gradients that it is added to."""
    groups = [(name, group) for name, group in record.once(Training).groups() if (number(group.get("eps")) or 0) > 1e-6]
    record.need_optimizers()
    for name, group in groups:
        rate, epsilon = number(group.get("lr")) or 0.0, number(group["eps"]) or 0.0
        size, moved = _measure(record, set(group.get("parameters", ())))
        small = np.isfinite(size) and rate > 0 and epsilon > 10 * size and moved < SHARE * rate
        is_odd = epsilon >= 0.1 and moved < 0.02 * rate  # said where the loss falls, too
        if small and (is_odd or not record.once(Training).fell):
            yield _describe_adam_epsilon(entry, record, name, epsilon, size, moved / rate)
            return


def _measure(record: Record, names: set[str]) -> tuple[float, float]:
    """Median over parameters and steps of the root mean square of gradients, and of updates."""
    sites = [site for site in record.of_kind("parameter", "update") if not names or str(site.value) in names]
    given = {str(site): str(got) for site in sites if (got := record.gradient_of(site.value)) is not None}
    if not given:
        return float("nan"), float("nan")
    gradients = record.history.matrix("rms", [*given.values()]).values
    moved = record.history.matrix("rms", [*given]).values
    return median(gradients), median(moved)


def _describe_adam_epsilon(
    entry: Entry, record: Record, name: str, epsilon: float, size: float, share: float
) -> Finding:
    return entry.finding(
        f"ε of {name} is {epsilon:g}, and its gradients are {size:.2g}: updates are {share:.2g} of the learning rate.",
        site=name,
        span=record,
        line=record.optimizers[name].line,
        evidence=[
            ("ε over the median gradient", epsilon / size if size else float("inf"), "> 10"),
            ("median update over the learning rate", share, f"< {SHARE:g}"),
        ],
        checked=[
            "the updates are small themselves",
            f"ε is {epsilon:g}" if record.once(Training).fell else "the loss has not fallen",
        ],
    )


@family.detector("momentum")
def momentum(record: Record, entry: Entry) -> Iterator[Finding]:
    """Momentum that remembers longer than the run lasts."""
    record.need_optimizers()
    for name, group in record.once(Training).groups():
        said = _judge(group)
        if said and (said[2].startswith("> √") or not _settles(record)):
            yield _describe_momentum(entry, record, name, *said)
            return


def _judge(group: dict[str, Any]) -> tuple[str, float, str] | None:
    momentum, betas = number(group.get("momentum")), group.get("betas")
    if momentum is not None and momentum >= LONG and not number(group.get("dampening")):
        return "momentum", momentum, f"≥ {LONG:g}"
    pair = [number(each) for each in betas] if isinstance(betas, list | tuple) else []
    first, second = (*pair, None, None)[:2]
    if first is None or second is None:
        return None
    if first > second**0.5:
        return "β₁", first, f"> √β₂ = {second**0.5:.3g}"
    return ("β₁", first, f"≥ {LONG:g}") if first >= LONG else None


def _settles(record: Record) -> bool:
    """Check whether the loss ends near its lowest, with no swing up on the way."""
    loss = record.once(Training).loss.values
    if len(loss) < 10 or not np.isfinite(loss).all():
        return False
    parts = [float(np.median(part)) for part in np.array_split(loss, 5)]
    return record.once(Training).fell and parts[-1] <= 1.1 * min(parts)


def _describe_momentum(entry: Entry, record: Record, name: str, what: str, value: float, bound: str) -> Finding:
    memory = "all gradients, ever more" if value >= 1 else f"the gradients of {1 / (1 - value):.0f} steps"
    lasts = f"it adds up {memory}, and {len(record.steps)} were recorded"
    settles = "are the betas swapped?" if bound.startswith("> √") else "the loss does not settle"
    return entry.finding(
        f"The {what} of {name} is {value:g}: {lasts}; {settles}.",
        site=name,
        span=record,
        line=record.optimizers[name].line,
        evidence=[(what, value, bound), ("loss at the end", record.once(Training).late)],
        checked=[f"{what} is {bound}" if bound.startswith("> √") else "the loss does not end at its lowest"],
    )
