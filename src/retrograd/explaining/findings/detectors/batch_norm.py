"""Statistics of batch norms that are never updated, that forget all, or that are of next to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from retrograd.core.history.facts import Buffer, Modes
from retrograd.core.runs.findings import Evidence, Finding
from retrograd.core.sites.site import ROOT
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.layers import Layer, Layers
from retrograd.explaining.findings.record import CannotTell, Record

family = Family(__name__)

HARDLY = 0.1
"""Momentum times steps, below which running statistics are still as they began."""

LAST = 0.95
"""Momentum from which on they are those of the last batch."""

FEWEST = 3
"""Times that it was in training mode, from which on that is no trial."""

FEW = 4
"""Values of a channel from which statistics are too noisy."""


@family.detector("batch-norm")
def batch_norm(record: Record, entry: Entry) -> Iterator[Finding]:
    """A batch norm remembers the wrong statistics, or computes them from too little."""
    norms = [(k, layer) for k, layer in enumerate(record.once(Layers).listed) if "BatchNorm" in layer.type]
    if not norms:
        raise CannotTell("there is no batch norm that was called in training")
    for k, layer in norms:
        if not _trains(record, layer.path):
            continue
        found = _judge(entry, record, layer, k)
        if found is not None:
            yield found
            return


def _judge(entry: Entry, record: Record, layer: Layer, place: int) -> Finding | None:
    looks = [each for each in record.buffers if each.name == f"{layer.path}:running_mean"]
    few = _count_values(record, layer)
    if 0 < few < FEW:
        return _describe_few(entry, record, layer, few)
    if len({each.step for each in looks}) < 3:
        return None
    momentum = estimate_momentum(record, looks, place)
    if len({each.digest for each in looks}) == 1 or momentum * len(record.steps) < HARDLY:
        is_trained = _trains(record, layer.path, looks[0].step, looks[-1].step)
        return _describe_same(entry, record, layer, looks, momentum) if is_trained else None
    if looks[0].digest != looks[-1].digest and _is_frozen(record, layer.path):
        return _describe_frozen(entry, record, layer)
    return _describe_last(entry, record, layer, momentum) if momentum > LAST else None


def _count_values(record: Record, layer: Layer) -> float:
    """Values of each channel in a batch; 0 where that is not known."""
    scale = f"{layer.path}:weight.grad"
    if scale not in record.history or not len(record.series(layer.site)):
        return 0.0
    rows, channels = record.series(layer.site).rows, record.series(scale).count
    calls = np.maximum(rows["calls"], 1)
    return float(np.median(rows["count"] / calls) / channels[0]) if len(channels) else 0.0


def _describe_same(entry: Entry, record: Record, layer: Layer, looks: list[Buffer], momentum: float) -> Finding:
    is_small = momentum * len(record.steps) < HARDLY
    why = f": a momentum of {momentum:.2g} hardly updates them" if is_small else " though it trains"
    return _describe(
        entry,
        record,
        layer,
        f"The running statistics of {layer.path} ({layer.type}) are {'as good as ' if is_small else ''}the same at "
        f"step {looks[0].step} and at step {looks[-1].step}{why}, and eval mode will use them.",
        Evidence("sampled steps", len(looks), f"≥ 3, all with one digest, or momentum × steps < {HARDLY:g}"),
        "its momentum is larger" if is_small else "its buffers differ between two steps of training",
        "give it a larger momentum, as torch's 0.1."
        if is_small
        else "see that its momentum is above 0, and that nothing writes the old statistics back (a copy of the "
        "module, load_state_dict, functional_call).",
    )


def _describe_frozen(entry: Entry, record: Record, layer: Layer) -> Finding:
    part = layer.path.partition(".")[0]
    return _describe(
        entry,
        record,
        layer,
        f"The running statistics of {layer.path} ({layer.type}) move in training, though all weights of {part} are "
        "frozen: in eval mode they will not be those that these weights were trained with.",
        Evidence("weights around it that changed, or require a gradient", 0, "none"),
        f"{part} is meant to take on the statistics of this data",
        f"call {part}.eval() behind each train() of the model, for as long as {part} is frozen.",
    )


def _describe_last(entry: Entry, record: Record, layer: Layer, momentum: float) -> Finding:
    return _describe(
        entry,
        record,
        layer,
        f"The running statistics of {layer.path} ({layer.type}) are those of the last batch alone: a momentum of "
        f"{momentum:.2g} forgets all others.",
        Evidence("momentum, by two sampled steps and the batch between", momentum, f"> {LAST:g}"),
        f"its momentum is below {LAST:g}",
        "give it a smaller momentum, as torch's 0.1: it is the part of the new batch.",
    )


def _describe_few(entry: Entry, record: Record, layer: Layer, few: float) -> Finding:
    return _describe(
        entry,
        record,
        layer,
        f"{layer.path} ({layer.type}) computes its statistics from {few:g} values of each channel.",
        Evidence("values of a channel", few, f"< {FEW}"),
        f"a batch holds at least {FEW} values of each channel",
        "train with larger batches, or use GroupNorm or LayerNorm, which take no statistics over the batch.",
    )


def _describe(
    entry: Entry, record: Record, layer: Layer, text: str, evidence: Evidence, refute: str, repair: str
) -> Finding:
    return entry.finding(
        text, site=layer.path, span=record, line=layer.line, evidence=[evidence], refute=refute, repair=repair
    )


def estimate_momentum(record: Record, looks: list[Buffer], place: int) -> float:
    """Estimate the part of a batch's mean that goes into the running one, by samples at two steps; NaN if unknown."""
    if place == 0:
        return float("nan")
    layers = record.once(Layers).listed
    into, out = record.series(layers[place - 1].site), record.series(layers[place].site).rows
    if len(np.unique(out["step"])) < len(out["step"]) or (out["calls"] > 1).any():
        return float("nan")  # several batches a step, of which one alone is known
    means = dict(zip(into.steps.tolist(), into.mean.tolist(), strict=True))
    found = []
    for before, after in pairwise(looks):
        moved = means.get(before.step, np.nan) - before.value
        if after.step == before.step + 1 and abs(moved) > 0:
            found.append((after.value - before.value) / moved)
    is_steady = len(found) > 1 and min(found) >= 0 and max(found) <= 1.2 * min(found) + 1e-4
    return float(np.median(found)) if is_steady else float("nan")


def _is_frozen(record: Record, path: str) -> bool:
    """Check whether no weight of the outermost part that holds a module is trained, though others of the model are."""
    part = path.partition(".")[0]
    inside = {name: each for name, each in record.looks.items() if name.startswith((f"{part}.", f"{part}:"))}
    is_still = all(len({each.digest for each in listed}) == 1 < len(listed) for listed in inside.values())
    has_layers = any(len(listed[0].shape) > 1 for listed in inside.values())
    trained = {name for name, listed in record.looks.items() if any(each.requires_grad for each in listed)}
    return has_layers and is_still and bool(trained) and not trained & inside.keys()


def _trains(record: Record, path: str, first: int = 0, last: int | None = None) -> bool:
    """Check whether a module was in training mode, at some step before ``last`` and from ``first`` on.

    A mode lasts until its model's next one is noted. One that is taken back in the same step has been for a trial.
    """
    told = [(modes.step, mode) for modes in record.modes if (mode := _mode_of(modes, path)) is not None]
    if not told:
        return True
    ends = [step for step, _ in told[1:]] + [record.last_step or 0]
    spans = [(max(begin, first), end) for (begin, mode), end in zip(told, ends, strict=True) if mode]
    if last is None:
        return bool(spans)
    return any(begin < min(end, last) for begin, end in spans) or len(spans) >= FEWEST


def _mode_of(modes: Modes, path: str) -> bool | None:
    """The mode of a module: that of the nearest module around it that is listed; None in that of another model."""
    parts = path.split(".")
    for length in range(len(parts), -1, -1):
        name = ".".join(parts[:length]) or ROOT
        if name in modes.training or name in modes.evaluating:
            return name in modes.training
    return None
