"""Units that do nothing: dead behind a ReLU, saturated behind tanh, sigmoid or softmax, rows that are never used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from retrograd.core.amounts import count_more
from retrograd.core.groups import gather
from retrograd.core.history.facts import Softmax
from retrograd.core.history.matrix import Matrix
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.coverage import Coverage
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.layers import Layer, Layers
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import FloatArray, IntArray, Training

family = Family(__name__)

DEAD = 0.5
"""Share of a layer's units from which on it is reported, where the loss does not fall."""

MOST = 0.9
"""Share of a layer's units from which on it is reported, where the loss falls."""

LOOKS = 4
"""Sampled steps over which a unit must have been zero."""

SAMPLES = 100
"""Elements of a unit that must have been zero in all."""

FLAT = 0.08
"""Mean slope of a bounded function over its largest, below which it is saturated."""

ONE_HOT = 0.95
"""Σp² / Σp of a softmax from which on it picks one."""

ALWAYS = 0.9
"""Σp² / Σp from which on it is reported where the loss falls too, if it has been so in all sampled steps."""

SHARP = 0.7
"""Σp² / Σp at the first steps, where it should be near to 1/n."""


@dataclass(frozen=True, slots=True)
class Dead:
    """A layer with dead units.

    Attributes:
        layer: which.
        dead, units: how many of how many.
        since: the first step since which they have been.
        seen: in how many steps that was observed.
        state: how they have been: zero, or below zero before a ReLU that is not a module.
        before: the last step before it at which that was recorded, and was not so; None where there is none.
    """

    layer: Layer
    dead: int
    units: int
    since: int
    seen: int
    state: str = "zero"
    before: int | None = None

    @property
    def share(self) -> float:
        """Share of its units that are dead."""
        return self.dead / self.units


@family.detector("dead-units")
def dead_units(record: Record, entry: Entry) -> Iterator[Finding]:
    """Units behind a ReLU that are zero for all that comes in."""
    found = record.once(list_dead)
    training = record.once(Training)
    bound = MOST if training.fell or training.is_contest else DEAD
    most = [dead for dead in found if dead.share > bound]
    if most:
        yield _describe_dead_units(entry, record, most, bound)


def _describe_dead_units(entry: Entry, record: Record, found: list[Dead], bound: float) -> Finding:
    worst = max(found, key=lambda dead: dead.share)
    more = f", and so have those of {count_more(len(found) - 1, 'layer')}" if len(found) > 1 else ""
    whole = "All units" if worst.share == 1 else f"{worst.share:.0%} of the units"
    began_so = worst.since <= record.steps[0]
    coverage = record.once(Coverage)
    start = "since the first step" if began_so else coverage.tell_since(worst.since, worst.before)
    sample = "every sample" if coverage.is_whole else "every sample that was seen"
    cause = ": they were initialised that way" if began_so else ""
    change = "Initialise the biases before it at 0" if began_so else "Lower the learning rate"
    return entry.finding(
        f"{whole} of {worst.layer.path} ({worst.layer.type}) have been {worst.state} for {sample} "
        f"{start}{more}{cause}.",
        severity="critical" if worst.share == 1 else "warning",
        site=worst.layer.path,
        step=worst.since,
        last_step=record.last_step,
        line=worst.layer.line,
        evidence=[
            ("share of its units that are dead", worst.share, f"> {bound:g}"),
            ("steps in which this was observed", worst.seen, f"≥ {LOOKS}"),
        ],
        checked=[
            f"the layer is a {worst.layer.type}"
            if "ReLU" in worst.layer.type
            else f"they were so {worst.seen} times one after the other",
            "the loss has not fallen" if bound == DEAD else f"more than {MOST:.0%} of the units are dead",
        ],
        repair=f"{change}; or use LeakyReLU, whose slope is nowhere 0.",
    )


def list_dead(record: Record) -> list[Dead]:
    """Layers with dead units, in the order of the forward; what has no gradient since a later one is dead is none."""
    layers = record.once(Layers)
    asked = [str(layer.site if _is_relu(layer) else layer.site.grad) for layer in layers.listed]
    found = []
    for layer, is_still in zip(
        layers.listed, _end_in_zeros(layers.lay_out(asked, "zero_share"), len(asked)), strict=True
    ):
        dead = None
        if _is_relu(layer):
            dead = _from_looks(record, layer) or (_from_rows(record, layer) if is_still else None)
        elif layer.weighs:
            dead = _from_looks(record, layer) or (_from_gradients(record, layer) if is_still else None)
        found += [dead] if dead else []
    last = max((place for place, dead in enumerate(found) if dead.share == 1), default=-1)
    return [dead for place, dead in enumerate(found) if dead.state == "zero" or place >= last]


def _is_relu(layer: Layer) -> bool:
    return "ReLU" in layer.type and layer.type not in ("LeakyReLU", "PReLU", "RReLU")


def _end_in_zeros(shares: Iterable[Matrix], lines: int) -> list[bool]:
    """For each line whether all elements are zero at its last step; a series of each would read a long record anew."""
    lasts = np.full(lines, np.nan)
    for matrix in shares:
        for place, line in enumerate(matrix.values):
            lasts[place] = next(iter(line[np.isfinite(line)][-1:]), lasts[place])
    return [bool(last == 1) for last in lasts]


def _from_looks(record: Record, layer: Layer) -> Dead | None:
    looks = [each for each in record.units if each.name == str(layer.site)]
    if not looks or looks[-1].value < 1:
        return None
    last = looks[-1]
    since = [each for each in looks if last.since <= each.step]
    if len(since) < LOOKS or sum(each.samples for each in since) < SAMPLES or not last.always:
        return None
    before = max((each.step for each in looks if each.step < last.since), default=None)
    begin = last.since
    if last.always == last.value:
        begin, before = _begin_of_all(record, layer, last.since, before)
    return Dead(layer, last.always, int(last.value), begin, len(since), before=before)


def _begin_of_all(record: Record, layer: Layer, seen: int, looked: int | None) -> tuple[int, int | None]:
    """The step since which no output is above zero, at which a look has found all units dead; it may be before that.

    And the last recorded one before it, which the looks tell where nothing else does.
    """
    if layer.site not in record.sites:
        return seen, looked
    series = record.series(layer.site)
    living = np.flatnonzero((series.steps < seen) & ~(series.max <= 0))
    later = series.steps[int(living[-1]) + 1 if len(living) else 0 :]
    return int(min(later[0], seen)) if len(later) else seen, int(series.steps[living[-1]]) if len(living) else None


def _from_rows(record: Record, layer: Layer) -> Dead | None:
    """Judge a layer all of whose outputs are zero."""
    series = record.series(layer.site)
    return _since(layer, series.steps, series.zero_share == 1, series.count)


def _from_gradients(record: Record, layer: Layer) -> Dead | None:
    """Judge a layer before a ReLU that is not a module: its outputs are below zero, and have no gradient."""
    if layer.site.grad not in record.sites:
        return None
    value, gradient = record.series(layer.site), record.series(layer.site.grad)
    if not np.array_equal(value.steps, gradient.steps):
        return None
    is_dead = (value.max <= 0) & (value.min < 0) & (gradient.zero_share == 1)
    found = _since(layer, value.steps, is_dead, value.count)
    return None if found is None else replace(found, state="below zero, where no gradient passes,")


def _since(layer: Layer, steps: np.ndarray, is_dead: np.ndarray, count: FloatArray) -> Dead | None:
    living = np.flatnonzero(~is_dead)
    begin = int(living[-1]) + 1 if len(living) else 0
    if len(steps) - begin < LOOKS or count[begin:].sum() < SAMPLES:
        return None
    return Dead(layer, 1, 1, int(steps[begin]), len(steps) - begin, before=int(steps[begin - 1]) if begin else None)


@family.detector("saturated")
def saturated(record: Record, entry: Entry) -> Iterator[Finding]:
    """Tanh and sigmoid whose outputs stand at their bounds, so that no gradient passes."""
    layers = record.once(Layers).listed
    bounded = [k for k, layer in enumerate(layers[:-1]) if layer.type in ("Tanh", "Sigmoid")]
    if not bounded:
        raise CannotTell("there is no Tanh or Sigmoid among the modules, but for the last")
    slopes = {k: slope_of(record, layers[k]) for k in bounded}
    flat = [k for k, slope in slopes.items() if len(slope) >= LOOKS and np.median(slope[-LOOKS:]) < FLAT]
    if record.once(Training).fell:  # then it is no more than a handicap, but for one that has been there from the start
        flat = [k for k in flat if (slopes[k] < FLAT).all() and record.steps[0] == 0]
    if flat:
        yield _describe_saturated(entry, record, layers, flat[0], slopes[flat[0]], len(flat))


def _describe_saturated(
    entry: Entry, record: Record, layers: list[Layer], place: int, slope: FloatArray, count: int
) -> Finding:
    layer = layers[place]
    steep = np.flatnonzero(~(slope < FLAT))
    begin = int(steep[-1]) + 1 if len(steep) else 0
    steps = record.series(layer.site).steps
    since = int(steps[begin])
    start = record.once(Coverage).tell_since(since, int(steps[begin - 1]) if begin else None)
    more = f", and so do those of {count_more(count - 1, 'layer')}" if count > 1 else ""
    return entry.finding(
        f"The outputs of {layer.path} ({layer.type}) stand at their bounds {start}{more}: its mean "
        f"slope is {np.median(slope[begin:]):.1%} of the largest.",
        site=layer.path,
        step=since,
        last_step=record.last_step,
        line=layer.line,
        evidence=[("mean slope over the largest", float(np.median(slope[begin:])), f"< {FLAT:g}")],
        checked=["it is not the last layer", tell_loss(record, "it was so at all steps, from the first on")],
    )


def tell_loss(record: Record, otherwise: str) -> str:
    """Return a text that the loss has not fallen, or what holds where it has."""
    return otherwise if record.once(Training).fell else "the loss has not fallen by a tenth"


def slope_of(record: Record, layer: Layer) -> FloatArray:
    """Mean slope of a tanh or sigmoid over its largest, at each step."""
    series = record.series(layer.site)
    if layer.type == "Tanh":
        return np.asarray(1 - series.rms**2)
    return np.asarray(4 * (series.mean - series.rms**2))


@family.detector("attention-collapse")
def attention_collapse(record: Record, entry: Entry) -> Iterator[Finding]:
    """A softmax inside of the model that picks one from the start."""
    found = _list_called(record) or _list_modules(record)
    if not found:
        raise CannotTell("no softmax was seen inside of the model")
    for each in found:
        began_so = bool(record.steps[0] == 0 and np.median(each.sure[:LOOKS]) >= SHARP)
        bound = SHARP if began_so else ONE_HOT
        always = bool(record.steps[0] == 0 and (each.sure >= ALWAYS).all())
        if len(each.sure) < LOOKS or not np.median(each.sure[-LOOKS:]) >= bound:
            continue
        if record.once(Training).fell and not always:
            continue
        yield _describe_attention_collapse(entry, record, each, bound)
        return


def _describe_attention_collapse(entry: Entry, record: Record, each: Sure, bound: float) -> Finding:
    below = np.flatnonzero(~(each.sure >= bound))
    place = min(int(below[-1]) + 1 if len(below) else 0, len(each.steps) - 1)
    since, before = int(each.steps[place]), int(each.steps[place - 1]) if place else None
    sure = float(np.median(each.sure[-LOOKS:]))
    return entry.finding(
        f"The softmax in {each.path} gives {sure:.0%} of its weight to one of all "
        f"{record.once(Coverage).tell_since(since, before)}, so that "
        "next to no gradient passes it.",
        site=each.path,
        step=since,
        last_step=record.last_step,
        line=each.line,
        evidence=[("Σp²/Σp", sure, f"≥ {bound:g}")],
        checked=["it is not the last layer", tell_loss(record, "it was so in all sampled steps")],
    )


@dataclass(frozen=True, slots=True)
class Sure:
    """Certainty of a softmax: Σp²/Σp at each of some steps, of more than two entries."""

    path: str
    line: str
    steps: IntArray
    sure: FloatArray


def _list_called(record: Record) -> list[Sure]:
    """List softmax functions, but for those that the model returns or that pick among few."""
    last = {
        (operation.module, operation.line)
        for noted in record.operations
        for number, operation in enumerate(noted.operations())
        if number in noted.outputs
    }
    looks = gather(((look.name, look.line), look) for look in record.of(Softmax) if look.entries > 2)
    return [
        Sure(path, line, np.array([look.step for look in listed]), np.array([look.value for look in listed]))
        for (path, line), listed in looks.items()
        if (path, line) not in last
    ]


def _list_modules(record: Record) -> list[Sure]:
    found = []
    for layer in record.once(Layers).listed[:-1]:
        series = record.series(layer.site) if layer.type == "Softmax" else None
        if series is not None and np.mean(series.mean) < 0.4:
            sure = series.rms**2 / np.where(series.mean > 0, series.mean, np.nan)
            found.append(Sure(layer.path, layer.line, series.steps, sure))
    return found


@family.detector("embedding-unused")
def embedding_unused(record: Record, entry: Entry) -> Iterator[Finding]:
    """An embedding of which one row alone is ever looked up."""
    looks, coverage = [each for each in record.units if each.used >= 0], record.once(Coverage)
    if not looks:
        raise CannotTell("no look at an embedding was recorded")
    for name in dict.fromkeys(each.name for each in looks):
        listed = [each for each in looks if each.name == name]
        last, path = listed[-1], name.rpartition(":")[0]
        if last.used == 1 and last.value >= 4 and len(listed) >= LOOKS and sum(e.samples for e in listed) >= SAMPLES:
            yield entry.finding(
                f"Only one of the {last.value:.0f} rows of {path} was looked up in all of {len(listed)} sampled steps, "
                f"of {len(record.steps if coverage.is_whole else coverage.made)}.",
                site=path,
                step=listed[0].step,
                last_step=last.step,
                line=record.line_of(path),
                evidence=[("rows looked up", last.used, "1")],
                checked=[f"in {len(listed)} sampled steps"],
            )
