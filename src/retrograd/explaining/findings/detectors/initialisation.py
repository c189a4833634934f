"""Weights that are wrong from the start: too large, all zero, or all alike."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

import numpy as np

from retrograd.core.amounts import count_more
from retrograd.core.history.facts import Parameter
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.chain import shape_of
from retrograd.explaining.findings.coverage import Coverage
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.gradients import ParameterGradients
from retrograd.explaining.findings.layers import Layer, Layers, take_first
from retrograd.explaining.findings.numbers import divide
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import FloatArray, Training

family = Family(__name__)

GAIN = 4.0
"""Root mean square of a layer's output over that of its input, from which on its weights are large."""

WIDE = 8.0
"""Root mean square of what comes out of such a layer, from which on it matters."""

TINY = 0.03
"""Root mean square of a weight times √fan_in, up to which it is small; torch's own initialisation has 0.58."""

TINY_ROWS = 1e-4
"""Root mean square of an embedding, up to which it is small; 0.02 to 1 are usual."""

HUGE = 10.0
"""Root mean square of a weight times √fan_in, from which on it is large."""

HUGE_AGAIN = 2.5
"""Bound for a recurrent weight: its powers grow."""

BOUNDED = ("Tanh", "Sigmoid", "Softmax", "Softsign", "LogSigmoid", "Hardtanh", "Hardsigmoid")
"""Functions that are flat for large arguments."""

BOUNDED_CALLS = ("tanh", "sigmoid", "softmax", "softsign", "hardtanh", "hardsigmoid")
"""Functions of torch that are flat for large arguments."""

LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy_loss")


@family.detector("bad-init")
def bad_init(record: Record, entry: Entry) -> Iterator[Finding]:
    """Weights that are so large at the start that activations grow out of bounds, or so small that nothing is left."""
    if not len(record.steps) or record.steps[0] != 0:
        raise CannotTell("the first step was not recorded")
    layers = record.once(Layers).listed
    matrix = take_first(record.once(Layers).values("rms"), 1)
    if not len(matrix.steps):
        raise CannotTell("no output was recorded in training")
    rms = matrix.values[:, 0]
    gains = measure_gains(record, layers, np.maximum(rms - _bias_rms(record, layers), 0.0))
    large = [k for k in range(len(layers)) if gains[k] >= GAIN and layers[k].weighs]
    if _grows(layers, rms, large) or (large and _matters(record, layers, rms, large)):
        yield _describe_bad_init(entry, record, layers, rms, gains, large)
    else:
        yield from _judge_weights(entry, record)


def _judge_weights(entry: Entry, record: Record) -> Iterator[Finding]:
    """Check the weights themselves: all too small, or one too large whose output is not seen."""
    gains = weight_gains(record)
    if record.once(Training).fell:
        return
    seen = {layer.path for layer in record.once(Layers).listed if layer.weighs}
    rows = weight_gains(record, of_rows=True)
    small = {name: gain for name, gain in gains.items() if 0 < gain <= TINY}
    small |= {name: size for name, size in rows.items() if 0 < size <= TINY_ROWS}
    large = {
        name: gain
        for name, gain in gains.items()
        if gain >= (HUGE_AGAIN if "weight_hh" in name else HUGE) and name.rpartition(":")[0] not in seen
    }
    if len(small) >= 2 and len(small) >= (len(gains) + len(rows)) / 2:
        yield _describe_weights(entry, record, small, "small", f"≤ {TINY:g}")
    elif large:
        yield _describe_weights(
            entry, record, large, "large", f"≥ {HUGE:g}, {HUGE_AGAIN:g} of what is multiplied again and again"
        )


def _describe_weights(entry: Entry, record: Record, gains: dict[str, float], how: str, bound: str) -> Finding:
    name, gain = next(iter(gains.items()))
    more = f", and so are {count_more(len(gains) - 1, 'weight')}" if len(gains) > 1 else ""
    return entry.finding(
        f"{name} is too {how} at the start: its root mean square times √fan_in is {gain:.2g}{more}; 0.6 to 1.4 is "
        "usual.",
        case="weights",
        site=name,
        step=0,
        last_step=0,
        line=record.line_of(name),
        evidence=[("root mean square times √fan_in", gain, bound), ("weights of this kind", len(gains))],
    )


def _grows(layers: list[Layer], rms: FloatArray, large: list[int]) -> bool:
    return len(large) >= 2 and bool(rms[large[-1]] >= 100 * rms[large[0]] / GAIN)


def _matters(record: Record, layers: list[Layer], rms: FloatArray, large: list[int]) -> bool:
    called = _list_bounded(record)
    wide = [k for k in large if rms[k] >= WIDE]
    followed = [layers[k].path in called or layers[min(k + 1, len(layers) - 1)].type in BOUNDED for k in wide]
    is_head = large[-1] == max(k for k, layer in enumerate(layers) if layer.weighs)
    return any(followed) or (is_head and bool(rms[large[-1]] >= WIDE) and _loses_much(record))


def _loses_much(record: Record) -> bool:
    classes = count_classes(record)
    return classes > 0 and record.once(Training).initial > 3 * np.log(max(classes, 2))


def _describe_bad_init(
    entry: Entry, record: Record, layers: list[Layer], rms: FloatArray, gains: FloatArray, large: list[int]
) -> Finding:
    first, last = layers[large[0]], layers[large[-1]]
    mean = float(np.exp(np.log(gains[large]).mean()))
    if len(large) > 1:
        text = (
            f"The weights of {len(large)} layers are too large at the start: outputs grow {mean:.2g} times a "
            f"layer, from {rms[large[0]]:.2g} at {first.site} to {rms[large[-1]]:.2g} at {last.site}."
        )
    else:
        text = (
            f"The weights of {first.path} are too large at the start: its output is {gains[large[0]]:.2g} times "
            f"its input, {rms[large[0]]:.2g} in root mean square."
        )
    return entry.finding(
        text,
        severity="warning" if record.once(Training).fell else "critical",
        site=first.path,
        step=0,
        last_step=0,
        line=first.line,
        evidence=[
            ("layers of too large a gain", len(large)),
            ("mean gain of those", mean, f"≥ {GAIN:g}"),
            (f"root mean square at {last.site}", float(rms[large[-1]]), f"≥ {WIDE:g}"),
            ("loss before the first update", record.once(Training).initial),
        ],
    )


def measure_gains(record: Record, layers: list[Layer], rms: FloatArray) -> FloatArray:
    """Root mean square of each layer's output over that of what ran before it; NaN where that is not known."""
    before = np.concatenate(([_input_rms(record)], rms[:-1]))
    return divide(rms, np.maximum(before, 1.0))


def _bias_rms(record: Record, layers: list[Layer]) -> FloatArray:
    """Root mean square of each layer's bias before the first update; 0 where it has none.

    What its weights give is, by the triangle inequality, at least the output less this.
    """
    known = {each.name: each.value for each in record.parameters if each.step == 0}
    found = np.array([known.get(f"{layer.path}:bias", 0.0) for layer in layers])
    return np.where(np.isfinite(found), found, 0.0)


def weight_gains(record: Record, *, of_rows: bool = False) -> dict[str, float]:
    """Root mean square times √fan_in of each matrix that inputs are multiplied by, before the first update.

    With ``of_rows`` those of which rows are looked up, with their root mean square itself.
    """
    found: dict[str, float] = {}
    for look in record.parameters:
        path, _, name = look.name.rpartition(":")
        is_matrix = len(look.shape) >= 2 and "weight" in name and ("Embedding" in record.type_of(path)) == of_rows
        if look.step == 0 and is_matrix and look.requires_grad and np.isfinite(look.value):
            fan_in = 1 if of_rows else np.prod(look.shape[1:])
            found.setdefault(look.name, float(look.value * np.sqrt(fan_in)))
    return found


def _list_bounded(record: Record) -> set[str]:
    """Modules whose output goes into a bounded function that is called as a function."""
    found = set()
    for noted in record.operations[:1]:
        operations = noted.operations()
        for operation in operations:
            if operation.name.rstrip("_") in BOUNDED_CALLS:
                found |= {operations[number].module for number in operation.operands if number >= 0}
    return found


def _input_rms(record: Record) -> float:
    """Root mean square of the model's first input; NaN where that is not known."""
    found = [each for listed in record.inputs.values() for each in listed if each.step == 0 and "float" in each.dtype]
    squares = [each.value**2 + each.std**2 for each in found]
    return float(np.sqrt(max(squares))) if squares else float("nan")


def count_classes(record: Record) -> int:
    """Count the classes that the first cross-entropy tells apart; 0 where there is none among what was called."""
    for made in record.operations[:1]:
        for operation in made.operations():
            if operation.name in LOSSES and operation.takes:
                shape = shape_of(operation.takes[0])
                return 2 if "binary" in operation.name else shape[min(1, len(shape) - 1)] if shape else 0
    return 0


@family.detector("symmetric-init")
def symmetric_init(record: Record, entry: Entry) -> Iterator[Finding]:
    """Units that begin alike, and stay so."""
    same = _find_same(record)
    zero = [] if same else _find_zero(record)
    if same:
        looks, gradient = next(iter(same.values()))
        steps = [each.step for each in looks]
        yield _describe_symmetric_init(
            entry,
            record,
            list(same),
            f"All {looks[0].shape[0]} rows",
            f"are the same, and still are at step {steps[-1]}: its units learn as one",
            f"they are the same at steps {', '.join(map(str, steps[:-1]))} and {steps[-1]}, with gradients up to "
            f"{gradient:.2g} between",
        )
    elif zero:
        count = len(record.once(Training).updates.steps)
        how = "are zero, and stay so: neither layer lets a gradient through to the other"
        which = "updates" if record.once(Coverage).is_whole else "recorded updates"
        checked = f"none of {count} {which} changed them, and a gradient comes to the last of them"
        yield _describe_symmetric_init(entry, record, zero, "All weights", how, checked)


def _find_same(record: Record) -> dict[str, tuple[list[Parameter], float]]:
    """Weights whose rows are the same at all looks, though gradients come: the looks, and the largest of those."""
    found = {}
    for name, looks in record.looks.items():
        listed = [each for each in looks if len(each.shape) >= 2 and each.shape[0] > 2 and each.requires_grad]
        if len(listed) > 1 and all(each.same_rows >= each.shape[0] for each in listed):
            gradient = _largest(record, f"{name}.grad", listed[-1].step)
            if gradient > 0 and _is_updated(record, name, listed[0].step, listed[-1].step):
                found[name] = listed, gradient
    return found


def _is_updated(record: Record, name: str, first: int, last: int) -> bool:
    """Check whether an update changed a parameter between two looks at it; yes where no update of it is known."""
    if not record.of_kind("parameter", "update"):
        return True
    updates = record.once(Training).updates
    lines = [line for line, site in enumerate(updates.sites) if str(site.value) == name]
    return not lines or bool(updates.tell_spans(lines[0], [first, last])[0])


def _find_zero(record: Record) -> list[str]:
    updates = record.once(Training).updates
    if len(updates.steps) < 3:
        raise CannotTell("fewer than three updates were recorded")
    weighs = [layer.path for layer in record.once(Layers).listed if layer.weighs]
    coverage = record.once(Coverage)
    zero = {
        site.path
        for k, site in enumerate(updates.sites)
        if site.keys[0] == "weight"
        and (updates.first_weights[k] == 0).all()
        and not updates.told[k]
        and (coverage.is_whole or not record.once(ParameterGradients).has_changed(str(site.value)))
    }
    last = int(updates.steps[-1]) + 1
    pairs = [(a, b) for a, b in pairwise(weighs) if a in zero and b in zero]
    pairs = [(a, b) for a, b in pairs if _largest(record, f"{b}:output.grad", last) > 0]
    return [f"{path}:weight" for path in dict.fromkeys(chain(*pairs))]


def _describe_symmetric_init(
    entry: Entry, record: Record, names: list[str], what: str, how: str, checked: str
) -> Finding:
    more = f" and of {count_more(len(names) - 1, 'weight')}" if len(names) > 1 else ""
    return entry.finding(
        f"{what} of {names[0]}{more} {how}.",
        site=names[0],
        span=record,
        line=record.line_of(names[0]),
        evidence=[("parameters of this kind", len(names))],
        checked=[checked],
    )


def _largest(record: Record, name: str, last: int) -> float:
    """The largest element of a gradient before a step; 0 where none was recorded."""
    if name not in record.history:
        return 0.0
    series = record.series(name)
    return float(np.nanmax(series.abs_max[series.steps < last], initial=0.0))
