"""``rg.explain``: ask every detector, put symptoms under their causes, and rank the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from retrograd.core.amounts import count_of
from retrograd.core.errors import ExplainError
from retrograd.core.guesses import names_arguments
from retrograd.core.notices import tell_far
from retrograd.core.runs.chosen_ranks import tell_chosen
from retrograd.core.runs.findings import SEVERITIES, Finding, Findings, NotChecked
from retrograd.core.runs.reader import Given, Run, find_run
from retrograd.explaining.findings.detector import Detector
from retrograd.explaining.findings.detectors import DETECTORS
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.stretches import list_parts


@names_arguments
def explain(what: Given, *, detectors: Sequence[Detector] | None = None) -> Findings:
    """Find what is wrong with a run.

    Args:
        what: a run, its folder, a history, or a recording, which may still go on.
        detectors: who is asked; those that are on by default when left out.

    Returns:
        The findings, causes before symptoms; what could not be checked is in their ``not_checked``.

    Raises:
        NotARunError, DamagedRunError: the folder cannot be read.
        ExplainError: it is nothing that was recorded.
    """
    return explain_record(make_record(what), detectors)


def make_record(what: Given) -> Record:
    """The record of what can be explained.

    Raises:
        NotARunError, DamagedRunError: the folder cannot be read.
        ExplainError: it is nothing that was recorded.
    """
    run = find_run(what)
    if isinstance(run, Run):
        own = [rank for rank in run.ranks if not rank.is_extra]
        errors = [error for rank in own if (error := rank.facts.get("error"))]
        events = run.events_by_rank if any(rank.rank for rank in run.ranks) else None
        error = errors[0] if errors else None
        return Record(run.history, status=run.status, error=error, events=events, missing=lambda: run.missing)
    if run is None:
        raise ExplainError(
            f"{type(what).__name__} is not a run, a recording or a history.",
            repair="record some steps with `rg.record(model)`, and explain the recording; before any step is made, "
            "`rg.explain_gradients(model, loss)` and `rg.find_kinks(model, batch)` explain a model.",
        )
    return Record(run, status=str(run.manifest.get("status", "")), error=run.manifest.get("error"))


def explain_record(record: Record, detectors: Sequence[Detector] | None = None) -> Findings:
    """Run detectors on a record."""
    asked = DETECTORS if detectors is None else detectors
    found: list[Finding] = []
    not_checked: list[NotChecked] = []
    for number, detector in enumerate(asked, 1):
        tell_far(check=f"{number} of {len(asked)}")
        try:
            found.extend(_check_losses(detector, record) if detector.is_of_losses else detector.check(record))
        except CannotTell as reason:
            not_checked.append(NotChecked(detector.slug, str(reason)))
        except Exception as error:  # a fault of ours must not hide what the others say
            not_checked.append(NotChecked(detector.slug, f"it failed: {type(error).__name__}: {error}"))
    speakers = {each.detector for each in found}
    said = rank_findings(found, {each.slug: each.explains for each in asked if each.slug in speakers})
    steps, rows = count_of(len(record.history.made_steps), "step"), record.history.rows
    about = (
        f"{steps} at {count_of(len(record.sites), 'site')}" if len(record.history.made_steps) or record.sites else ""
    )
    about += f" ({chosen})" if about and (chosen := tell_chosen(record.manifest)) else ""
    unread = steps if rows.left_out and not rows.count else ""
    return Findings(said, not_checked, about, [each.slug for each in asked], record.missing(), unread)


def _check_losses(detector: Detector, record: Record) -> list[Finding]:
    """Run a detector on each stretch of a run in which other parameters are trained: the first that it finds.

    Raises:
        CannotTell: it can tell of none.
    """
    parts, reasons = record.once(list_parts), list[CannotTell]()
    for part in parts:
        try:
            found = list(detector.check(part))
        except CannotTell as reason:
            reasons.append(reason)
            continue
        if found and len(parts) > 1:
            return [each if each.step is not None else _place_in(each, part) for each in found]
        if found:
            return found
    if len(reasons) == len(parts):
        raise reasons[0]
    return []


def _place_in(finding: Finding, part: Record) -> Finding:
    return replace(finding, step=part.first_step, last_step=part.last_step) if len(part.steps) else finding


# ---- causes and symptoms ----


def rank_findings(found: Sequence[Finding], explains: Mapping[str, tuple[str, ...]]) -> list[Finding]:
    """Findings to be said: causes first, each with what it explains, and as severe as the gravest of that.

    Args:
        found: all, of all detectors.
        explains: of each detector, the detectors of symptoms that it explains.
    """
    ordered = sorted(found, key=_place)
    explained: dict[int, int] = {}
    for index, symptom in enumerate(ordered):
        for other, cause in enumerate(ordered):
            if other != index and other not in explained and _explains(cause, symptom, explains):
                explained[index] = other
                break
    said = []
    for index, finding in enumerate(ordered):
        if index not in explained:
            causes = finding.causes + tuple(ordered[each] for each in _list_explained(explained, index))
            worst = min((finding, *causes), key=lambda each: SEVERITIES.index(each.severity)).severity
            said.append(replace(finding, severity=worst, causes=causes))
    return sorted(said, key=_place)


def _list_explained(explained: Mapping[int, int], cause: int) -> Iterator[int]:
    """List the numbers of what a finding explains, and of what that explains in turn."""
    for index, by in explained.items():
        if by == cause:
            yield index
            yield from _list_explained(explained, index)


def _place(finding: Finding) -> tuple[int, int, float]:
    return SEVERITIES.index(finding.severity), finding.severity == "note", finding.step or 0


def _explains(cause: Finding, symptom: Finding, explains: Mapping[str, tuple[str, ...]]) -> bool:
    listed = explains.get(cause.detector, ())
    is_meant = symptom.detector in listed or ("*" in listed and symptom.severity == "note")
    began_before = symptom.step is not None and cause.step is not None and symptom.step < cause.step
    hides_more = cause.severity == "note" and symptom.severity != "note"  # else an alarm would become a note
    return is_meant and not hides_more and not began_before and symptom.detector != cause.detector
