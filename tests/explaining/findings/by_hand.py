"""Records made by hand: the elements of each site at each step, losses, and facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from retrograd.core.history.fact import Fact
from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, Moment, RowBatch
from retrograd.core.runs.findings import Finding, Findings
from retrograd.core.statistics.row import ROW
from retrograd.core.views.report.findings import describe_findings
from retrograd.core.views.report.scope import choose_scope
from retrograd.explaining.findings.detector import Detector
from retrograd.explaining.findings.detectors import DETECTORS
from retrograd.explaining.findings.record import CannotTell, Record
from tests.core.history.made import make_row

Elements = Mapping[str, np.ndarray]
MODULES = {"self": "Sequential", "0": "Linear", "1": "ReLU", "2": "Linear"}


def make_record(
    steps: Iterable[int],
    sites: Callable[[int], Elements],
    losses: Callable[[int], float] | Sequence[float] = (),
    *,
    weights: Callable[[int], Mapping[str, float]] = lambda step: {},
    modules: Mapping[str, str] = MODULES,
    facts: Iterable[Fact] = (),
    optimizer: str = "SGD",
) -> Record:
    """A record.

    Args:
        steps: which.
        sites: of each step, the elements of each site, in the order in which they are reached.
        losses: of each step.
        weights: of each step, the norms of parameters before their update.
        modules: class by path; the line of each is ``train.py`` and its place.
        facts: in their order, each of the step in its ``moment``.
        optimizer: class of the optimizer that updates at each step.
    """
    history = History()
    numbers: dict[str, int] = {}
    listed = [{"path": p, "type": t, "line": f"train.py:{k}"} for k, (p, t) in enumerate(modules.items())]
    history.describe(model=listed)
    for k, step in enumerate(steps):
        moment, elements, norms = Moment(step, 0, 0), sites(step), weights(step)
        for name in elements:
            if name not in numbers:
                numbers[name] = len(numbers)
                history.add_sites([name])
        made = [make_row(numbers[n], e, norms.get(n.removesuffix(".update"), 0.0) ** 2) for n, e in elements.items()]
        rows = np.array([fields for fields, _ in made], ROW)
        rows["order"] = np.arange(len(rows))
        history.add_rows(RowBatch(moment, rows.tobytes(), np.concatenate([bins for _, bins in made]).tobytes()))
        value = losses(step) if callable(losses) else losses[k] if len(losses) else None
        if value is not None:
            history.add_event(Event(moment, "loss", value=float(value)))
        if any(name.endswith(".update") for name in elements):
            history.add_event(Event(moment, "update", optimizer, float(k + 1)))
    for fact in facts:
        moment = fact.moment if fact.moment.step >= 0 else replace(fact.moment, step=0)
        history.add_event(Event(moment, fact.kind, fact.name, fact.value, fact.text))
    return Record(history)


def detector_of(slug: str) -> Detector:
    """The detector of ours with this name."""
    return next(each for each in DETECTORS if each.slug == slug)


def check(slug: str, record: Record) -> list[Finding]:
    """What a detector finds.

    Raises:
        CannotTell: it cannot tell.
    """
    return list(detector_of(slug).check(record))


def ask(detector: str | type[Detector], record: Record) -> list[Finding]:
    """What a detector says, each with something to see on the page; nothing where it cannot tell."""
    try:
        found = check(detector if isinstance(detector, str) else detector.slug, record)
    except CannotTell:
        return []
    for each in found:
        assert each.step is not None or not each.site or _has_row(each, record), f"nothing on the page shows {each}"
    return found


def _has_row(finding: Finding, record: Record) -> bool:
    """Whether the curves of a site show it; of calls alone there is no page."""
    if not len(record.steps):
        return True
    [told] = describe_findings(Findings([finding]), choose_scope(record.history, None, 100, 1.0))["listed"]
    return told["visit"] is not None


def spread(norm: float, count: int = 16) -> np.ndarray:
    """Elements of both signs with this norm."""
    return np.full(count, norm / np.sqrt(count)) * np.where(np.arange(count) % 2, 1, -1)
