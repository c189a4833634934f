"""Findings of a run for its page, and the first number that is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from retrograd.core.amounts import count_of
from retrograd.core.history.facts import OptimizerMade, read_facts
from retrograd.core.history.history import History
from retrograd.core.history.sink import Phase
from retrograd.core.runs.findings import (
    MISSING_GRADIENT,
    SHOWN,
    Finding,
    Findings,
    list_grounds,
    list_place,
    shorten_line,
    tell_repair,
)
from retrograd.core.sites.site import parse_leniently
from retrograd.core.views.report.scope import Scope
from retrograd.core.views.shown import ModelPlace


def describe_findings(findings: Findings, scope: Scope, places: Sequence[ModelPlace] = ()) -> dict[str, Any]:
    """Findings for the page: the first ``shown`` of the ``listed`` are seen at once.

    Those about missing gradients lead to the row of the first parameter among ``places`` that never got one.
    """
    ungraded = [place for place in places if "grad" in place.without]
    return {
        "about": findings.headline,
        "shown": SHOWN,
        "listed": [_describe(finding, scope, ungraded) for finding in findings],
        "not_checked": [(each.detector, each.reason) for each in findings.not_checked],
    }


def describe_card(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the run did, for the page."""
    return [
        {
            "topic": line["topic"],
            "text": ": ".join(filter(None, (line["label"], line["text"]))),
            "place": shorten_line(line["line"]),
            "details": list(line["details"]),
        }
        for line in lines
    ]


def _describe(finding: Finding, scope: Scope, ungraded: Sequence[ModelPlace]) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "message": finding.message,
        "place": " · ".join(list_place(finding)),
        "detector": finding.detector,
        "repair": tell_repair(finding),
        "grounds": list(list_grounds(finding)),
        "visit": _find_evidence(finding, scope, ungraded),
    }


def _find_evidence(finding: Finding, scope: Scope, ungraded: Sequence[ModelPlace]) -> Mapping[str, Any] | None:
    """The site whose curves show it, None where the losses do, and of which steps; None where nothing does."""
    rows = ungraded if finding.detector == MISSING_GRADIENT else ()
    site = next((f"{each.name}.grad" for each in rows if each.path == finding.site), None)
    site = site or _find_site(finding.site, scope)
    is_in_loss = (finding.step is not None or not finding.site) and len(scope.history.loss.steps) > 0
    if len(scope.columns) == 0 or not (site or is_in_loss):
        return None
    first, last = (int(scope.columns.steps[place]) for place in (0, -1))
    if finding.step is not None and (finding.step > first or finding.last_step is not None):  # else it is all
        first, last = finding.step, max(finding.step, finding.last_step or 0)
    return {"site": site, "step": first, "last": last}


def _find_site(name: str, scope: Scope) -> str | None:
    """A recorded site of this name, else the first of the module, parameter or optimizer that it names, or is in."""
    if not name:
        return None
    known, path = set(scope.sites), parse_leniently(name).path
    near = (name, f"{name}.grad", f"{name}:output", f"{name}:output.grad")
    within = (f"{name}:", f"{name}#", f"{name}.", f"{path}:", f"{path}#")
    return (
        next((each for each in near if each in known), None)
        or next((each for prefix in within for each in scope.sites if each.startswith(prefix)), None)
        or next((each for each in _list_held(name, scope.history) if each in known), None)
    )


def _list_held(optimizer: str, history: History) -> Iterator[str]:
    """What may have been recorded of the parameters of an optimizer: updates and gradients."""
    made = [each for each in history.few_events if each.kind == OptimizerMade.kind and each.name == optimizer]
    for fact in read_facts(made):
        assert isinstance(fact, OptimizerMade)
        yield from (f"{parameter}.{part}" for parameter in fact.parameters for part in ("update", "grad"))


_COUNTS = {"nan": "NaN", "pos_inf": "+∞", "neg_inf": "−∞"}


def find_first_nonfinite(scope: Scope, places: Sequence[ModelPlace]) -> dict[str, Any] | None:
    """The first step with such elements, and the first of its sites; ``None`` where all were finite.

    Within a step the first is the one that was reached first. In a record without the order, values come
    before gradients, gradients before updates; values count in call order and gradients against it.

    Returns:
        ``step``, ``site`` and ``text``, which counts the elements.
    """
    phase, begin = scope.phase, scope.history.find_first_nonfinite(scope.phase)
    if begin is None:
        return None
    history = scope.history.since(begin)
    ordered = sorted(_rank_sites(places))
    sites = [site for _, _, site in ordered]
    for [matrix] in history.matrices(["nonfinite"], sites, phase):
        bad = matrix.values > 0
        columns = np.flatnonzero(bad.any(axis=0))
        if len(columns):
            step = int(matrix.steps[columns[0]])
            history = history.since(step, step)
            scope = replace(scope, history=history)
            found = [sites[row] for row in np.flatnonzero(bad[:, columns[0]])]
            site = min(found, key=lambda name: _reached(scope, name, step))
            return {"step": step, "site": site, "text": _count(history, site, phase, step)}
    return None


def _reached(scope: Scope, site: str, step: int) -> tuple[int, int]:
    """Micro-batch and order of the first row of a site at a step that has such elements."""
    rows = scope.history[site].select(phase=scope.phase).rows
    bad = (rows["step"] == step) & (rows["nan"] + rows["pos_inf"] + rows["neg_inf"] > 0)
    return min(zip(rows["micro"][bad].tolist(), rows["order"][bad].tolist(), strict=True), default=(0, -1))


def _rank_sites(places: Sequence[ModelPlace]) -> list[tuple[int, int, str]]:
    ranked = []
    for number, place in enumerate(places):
        for quantity, site in place.sites.items():
            if quantity == "value":
                ranked.append((0, number, site))
            elif quantity == "grad":
                ranked.append((1 if place.kind == "activation" else 2, -number, site))
            else:
                ranked.append((3, number, site))
    return ranked


def _count(history: History, site: str, phase: Phase, step: int) -> str:
    series = history[site].select(phase=phase)
    place = int(np.searchsorted(series.steps, step))
    parts = [
        f"{int(getattr(series, name)[place]):,} {word}"
        for name, word in _COUNTS.items()
        if getattr(series, name)[place]
    ]
    return f"{', '.join(parts)} of {count_of(int(series.count[place]), 'element')}"
