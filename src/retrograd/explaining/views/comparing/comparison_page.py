"""Several runs as one HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrograd.core.amounts import name_letters
from retrograd.core.errors import CompareError, RunWriteError
from retrograd.core.history.curve import Curve
from retrograd.core.history.history import History
from retrograd.core.history.sink import Phase
from retrograd.core.runs.findings import SEVERITIES, Finding, Findings
from retrograd.core.runs.listed import find_differing
from retrograd.core.runs.loss_curve import reduce_curve
from retrograd.core.runs.reader import Given, Run, read_history, read_run
from retrograd.core.runs.settings import read_settings
from retrograd.core.views.page.frame import Again, frame_page, write_page
from retrograd.core.views.report.blocks import Blocks
from retrograd.core.views.report.facts import describe_data, make_status, name_run, print_command
from retrograd.core.views.report.findings import describe_findings
from retrograd.core.views.report.scope import Scope
from retrograd.core.views.runs_table import show_setting
from retrograd.core.views.shown import group_places
from retrograd.explaining.comparing.comparison import Comparison, compare
from retrograd.explaining.comparing.pairs import plain_name, plain_names
from retrograd.explaining.findings.explain import explain
from retrograd.explaining.views.comparing.alignment import (
    Aligned,
    add_all_ungraded,
    align,
    find_missing,
    list_differences,
)
from retrograd.explaining.views.comparing.numbers import make_blocks

FILE_NAME = "compared.html"


def write_comparison(
    runs: Sequence[Given],
    path: str | os.PathLike[str] | None = None,
    *,
    comparisons: Sequence[Comparison | CompareError] | None = None,
    phase: Phase | None = None,
    columns: int = 1000,
    megabytes: float = 8.0,
) -> Path:
    """Write one HTML file that shows several runs over each other, opens offline and can be mailed.

    Losses and curves of all runs share a panel; the map shows by which factor each run differs from the first.

    Args:
        runs: two or more runs, folders, recordings or histories; the first is what the others are held against.
        path: the file; ``compared.html`` in the working directory when left out.
        comparisons: those of the first with each of the others, from :func:`retrograd.compare`; made when left out.
        phase: which kind of forward to show; the first that the first run has, when left out.
        columns: the most columns in which steps are drawn. A column keeps the extremes of its steps.
        megabytes: about how large the file may get; digits, then columns are given up for it.

    Returns:
        The path of the file.

    Raises:
        CompareError: there are fewer than two runs.
        NothingRecordedError: one of them is not a record.
        NotARunError, DamagedRunError: a folder cannot be read.
        RunWriteError: the file cannot be written.
    """
    found = [read_run(each) for each in runs]
    page = build_page(found, comparisons=comparisons, phase=phase, columns=columns, megabytes=megabytes)
    return write_page(FILE_NAME if path is None else path, page, "The comparison", RunWriteError)


def build_page(
    runs: Sequence[Run | History],
    *,
    comparisons: Sequence[Comparison | CompareError] | None = None,
    phase: Phase | None = None,
    columns: int = 1000,
    megabytes: float = 8.0,
    findings: Sequence[Findings] | None = None,
    again: Again | None = None,
    home: str = "",
) -> str:
    """Build the page as text; further arguments are those of :func:`write_comparison`.

    ``findings`` are those of each run, looked for when left out; ``again``, for a page that is served, says where it
    asks whether it has to be loaded again, and ``home`` where all runs are listed.
    """
    if len(runs) < 2:
        raise CompareError("A comparison needs two runs.", repair="give the run to compare with, too.")
    histories = [read_history(each) for each in runs]
    aligned = align(histories, phase, columns, megabytes)
    names, letters = name_apart([name_run(each) for each in runs]), name_letters(len(runs))
    others = zip(runs[1:], letters[1:], strict=True)
    compared = [_compare(runs[0], *each) for each in others] if comparisons is None else comparisons
    known = [explain(each) for each in runs] if findings is None else findings
    blocks, scope = make_blocks(aligned, names), aligned.shown
    places = add_all_ungraded(group_places(aligned.names), aligned, letters)
    data = describe_data(scope, places, Blocks(blocks, None, None))
    notes = note_places(aligned, find_missing(aligned), letters)
    for place, written in zip(places, data["places"], strict=True):
        written["note"] = next((notes[site] for site in place.sites.values() if site in notes), "")
    facts: dict[str, Any] = {
        "title": " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) < 5 else f"{len(names)} runs",
        "runs": [describe_run(*each) for each in zip(runs, names, letters, aligned.scopes, known, strict=True)],
        **describe_start([each.manifest for each in histories], [each.made_loss for each in histories]),
        "home": home,
        "apart": list_differences(aligned, letters),
        "verdicts": [describe_verdict(each, scope) for each in compared],
        "findings": describe_all_findings(known, letters, scope),
        "live": None,
        "again": None if again is None else again._asdict(),
        **data,
    }
    return frame_page(
        "retrograd.explaining.views.comparing",
        facts["title"],
        facts,
        {block.name: block.text for block in blocks},
        parts={"map": "retrograd.core.views.report"},
        is_served=again is not None,
    )


def _compare(first: Run | History, other: Run | History, letter: str) -> Comparison | CompareError:
    try:
        return compare(first, other, letter=letter)
    except CompareError as error:
        return error


def name_apart(names: Sequence[str]) -> list[str]:
    """Names of runs; those of the same name are numbered."""
    return [
        name if list(names).count(name) == 1 else f"{name} ({list(names[: place + 1]).count(name)})"
        for place, name in enumerate(names)
    ]


# ---- in words ----


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
