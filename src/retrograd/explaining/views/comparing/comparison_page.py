"""Several runs as one HTML page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrograd.core.amounts import name_letters
from retrograd.core.errors import CompareError, RunWriteError
from retrograd.core.history.history import History
from retrograd.core.history.sink import Phase
from retrograd.core.runs.findings import Findings
from retrograd.core.runs.reader import Given, Run, read_history, read_run
from retrograd.core.views.page.frame import Again, frame_page, write_page
from retrograd.core.views.report.blocks import Blocks
from retrograd.core.views.report.facts import describe_data, name_run
from retrograd.core.views.shown import group_places
from retrograd.explaining.comparing.comparison import Comparison, compare
from retrograd.explaining.findings.explain import explain
from retrograd.explaining.views.comparing.alignment import add_all_ungraded, align, find_missing, list_differences
from retrograd.explaining.views.comparing.descriptions import (
    describe_all_findings,
    describe_run,
    describe_start,
    describe_verdict,
    note_places,
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
