"""What is wrong with the run: the head of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrograd.findings.finding import Finding
from retrograd.findings.findings import SHOWN, Findings
from retrograd.findings.telling import list_grounds, list_place, tell_repair
from retrograd.sites.site import ROOT
from retrograd.views.report.scope import Scope


def describe_findings(findings: Findings, scope: Scope) -> dict[str, Any]:
    """Findings for the page: the first ``shown`` of the ``listed`` are seen at once."""
    return {
        "about": findings.headline,
        "shown": SHOWN,
        "listed": [_describe(finding, scope) for finding in findings],
        "not_checked": [(each.detector, each.reason) for each in findings.not_checked],
    }


def _describe(finding: Finding, scope: Scope) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "message": finding.message,
        "place": " · ".join(list_place(finding)),
        "detector": finding.detector,
        "repair": tell_repair(finding),
        "grounds": list(list_grounds(finding)),
        "visit": _find_evidence(finding, scope),
    }


def _find_evidence(finding: Finding, scope: Scope) -> Mapping[str, Any] | None:
    """The site whose curves show it, and the step; None where none does."""
    site = _find_site(finding.site, scope.sites)
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
