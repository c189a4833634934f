"""Findings of a run for its page, and the first number that is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from retrograd.amounts import count_of
from retrograd.findings.detectors.missing_gradients import MissingGradient
from retrograd.findings.finding import SHOWN, Finding, Findings, list_grounds, list_place, tell_repair
from retrograd.history.history import History
from retrograd.history.sink import Phase
from retrograd.sites.site import ROOT
from retrograd.views.report.scope import Scope
from retrograd.views.shown import ModelPlace


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
    """The site whose curves show it, and the step; None where none does."""
    rows = ungraded if finding.detector == MissingGradient.slug else ()
    site = next((f"{each.name}.grad" for each in rows if each.path == finding.site), None)
    site = site or _find_site(finding.site, scope.sites)
    if site is None or len(scope.columns.steps) == 0:
        return None
    return {"site": site, "step": int(scope.columns.steps[0]) if finding.step is None else finding.step}


def _find_site(name: str, sites: Sequence[str]) -> str | None:
    """A recorded site of this name, or the first of the module or parameter that it names."""
    if not name:
        return None
    near = (name, f"{name}.grad", f"{name}:output", f"{name or ROOT}:output.grad")
    return next((each for each in near if each in sites), None) or next(
        (each for each in sites if each.startswith((f"{name}:", f"{name}#", f"{name}."))), None
    )


_COUNTS = {"nan": "NaN", "pos_inf": "+∞", "neg_inf": "−∞"}


def find_first_nonfinite(scope: Scope, places: Sequence[ModelPlace]) -> dict[str, Any] | None:
    """The first step with such elements, and the first of its sites; ``None`` where all were finite.

    Within a step the first is the one that was reached first. In a record that does not tell the order, values come
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
