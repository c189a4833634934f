"""``rg.explain``: ask every detector, and rank what they say."""

from __future__ import annotations

import os
from collections.abc import Sequence

from retrograd.findings.causes import rank_findings
from retrograd.findings.detector import CannotTell, Detector
from retrograd.findings.detectors import DETECTORS
from retrograd.findings.finding import Finding
from retrograd.findings.findings import Findings, NotChecked
from retrograd.findings.record import Record
from retrograd.history.history import History
from retrograd.runs.reader import Run, open_run


def explain(what: Run | History | str | os.PathLike[str], *, detectors: Sequence[Detector] | None = None) -> Findings:
    """Say what is wrong with a run.

    Args:
        what: a run, its folder, or a history.
        detectors: who is asked; those that are on by default when left out.

    Returns:
        The findings, causes before symptoms; what could not be checked is in their ``not_checked``.

    Raises:
        NotARunError, DamagedRunError: the folder cannot be read.
    """
    return explain_record(make_record(what), detectors)


def make_record(what: Run | History | str | os.PathLike[str]) -> Record:
    """The record of a run, a folder or a history."""
    if isinstance(what, History):
        return Record(what, status=str(what.manifest.get("status", "")), error=what.manifest.get("error"))
    run = what if isinstance(what, Run) else open_run(what)
    errors = [rank.facts.get("error") for rank in run.ranks if rank.facts.get("error")]
    return Record(run.history, status=run.status, error=errors[0] if errors else None)


def explain_record(record: Record, detectors: Sequence[Detector] | None = None) -> Findings:
    """Ask detectors about a record."""
    asked = [make() for make in DETECTORS if make.is_default] if detectors is None else detectors
    found: list[Finding] = []
    not_checked: list[NotChecked] = []
    for detector in asked:
        try:
            found.extend(detector.check(record))
        except CannotTell as reason:
            not_checked.append(NotChecked(detector.slug, str(reason)))
        except Exception as error:  # a fault of ours must not hide what the others say
            not_checked.append(NotChecked(detector.slug, f"it failed: {type(error).__name__}: {error}"))
    said = rank_findings(found, {each.slug: each.explains for each in asked})
    about = f"{len(record.steps)} steps at {len(record.sites)} sites"
    return Findings(said, not_checked, about, [each.slug for each in asked])
