"""A comparison in words: the runs, where each diverges from the first, and the findings that only some have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrograd.core.errors import CompareError
from retrograd.core.history.curve import Curve
from retrograd.core.history.history import History
from retrograd.core.runs.findings import SEVERITIES, Finding, Findings
from retrograd.core.runs.listed import find_differing
from retrograd.core.runs.loss_curve import reduce_curve
from retrograd.core.runs.reader import Run
from retrograd.core.runs.settings import read_settings
from retrograd.core.views.report.facts import make_status, print_command
from retrograd.core.views.report.findings import describe_findings
from retrograd.core.views.report.scope import Scope
from retrograd.core.views.runs_table import show_setting
from retrograd.explaining.comparing.comparison import Comparison
from retrograd.explaining.comparing.pairs import plain_name, plain_names
from retrograd.explaining.views.comparing.alignment import Aligned


def describe_run(run: Run | History, name: str, letter: str, scope: Scope, findings: Findings) -> dict[str, Any]:
    """A line of the table of runs."""
    manifest, losses = scope.history.manifest, scope.history.made_loss.values
    steps = scope.history.made_steps if scope.phase == "train" else scope.columns.steps
    loss = float(losses[-1]) if len(losses) else None
    return {
        "letter": letter,
        "name": name,
        "status": make_status(run.status if isinstance(run, Run) else manifest.get("status")),
        "steps": f"{len(steps):,} ({steps[0]:,} to {steps[-1]:,})" if len(steps) else "none",
        "loss": None if loss is None else f"{loss:.4g}" if np.isfinite(loss) else str(loss).replace("nan", "NaN"),
        "sites": f"{len(scope.sites):,}",
        "findings": findings.headline,
        "command": print_command(manifest),
    }


def describe_start(manifests: Sequence[Mapping[str, Any]], losses: Sequence[Curve]) -> dict[str, Any]:
    """What comes first: the losses over each other, and the settings in which the runs differ."""
    settings = [read_settings(each) for each in manifests]
    return {
        "curves": [reduce_curve(each).as_facts() for each in losses],
        "settings": [
            {"name": name, "values": [show_setting(each.get(name)) for each in settings]}
            for name in find_differing(settings)
        ],
    }


def describe_verdict(comparison: Comparison | CompareError, scope: Scope) -> dict[str, Any]:
    """Where a run diverges from the first, why, and how to see it."""
    if isinstance(comparison, CompareError):
        return {"verdict": "cannot be compared", "said": str(comparison).partition("\n")[0], "visit": None}
    place = comparison.parting or comparison.first
    shown = dict(zip(plain_names(scope.sites), scope.sites, strict=True))
    is_there = place is not None and place.site in shown
    return {
        "verdict": comparison.verdict,
        "called": comparison.letter,
        "said": str(comparison).partition("\n")[0],
        "visit": {"site": shown[place.site], "step": place.step} if place is not None and is_there else None,
        "findings": describe_findings(Findings(comparison.findings), scope)["listed"],
        "context": list(comparison.context),
        "about": comparison.about,
    }


def describe_all_findings(found: Sequence[Findings], letters: Sequence[str], scope: Scope) -> dict[str, Any]:
    """Findings of all runs, each once with the runs that have it; first those that not all have, the worst first."""
    having: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
    for letter, findings in zip(letters, found, strict=True):
        for each in findings:
            letters_having = having.setdefault((each.detector, plain_name(each.site)), (each, []))[1]
            if letter not in letters_having:
                letters_having.append(letter)
    ordered = sorted(having.values(), key=lambda each: SEVERITIES.index(each[0].severity))
    described = describe_findings(Findings(each for each, _ in ordered), scope)["listed"]
    listed = [{**written, "runs": runs} for written, (_, runs) in zip(described, ordered, strict=True)]
    return {
        "some": [each for each in listed if len(each["runs"]) < len(letters)],
        "all": [each for each in listed if len(each["runs"]) == len(letters)],
    }


def note_places(aligned: Aligned, missing: Sequence[tuple[int, ...]], letters: Sequence[str]) -> dict[str, str]:
    """For sites that not all runs have, which have them."""
    return {
        name: "only " + ", ".join(letter for number, letter in enumerate(letters) if number not in lacking)
        for name, lacking in zip(aligned.names, missing, strict=True)
        if lacking
    }
