"""Which finding is the cause of which: symptoms are put under what explains them, and the rest is ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from retrograd.findings.finding import SEVERITIES, Finding


def rank_findings(found: Sequence[Finding], explains: Mapping[str, tuple[str, ...]]) -> list[Finding]:
    """Findings to be said: causes first, each with what it explains.

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
            causes = tuple(ordered[each] for each in ordered_keys(explained, index))
            said.append(replace(finding, causes=finding.causes + causes))
    return said


def ordered_keys(explained: Mapping[int, int], cause: int) -> list[int]:
    """The numbers of what a finding explains."""
    return [index for index, by in explained.items() if by == cause]


def _place(finding: Finding) -> tuple[int, int, float]:
    return SEVERITIES.index(finding.severity), finding.severity == "note", finding.step or 0


def _explains(cause: Finding, symptom: Finding, explains: Mapping[str, tuple[str, ...]]) -> bool:
    listed = explains.get(cause.detector, ())
    is_meant = symptom.detector in listed or ("*" in listed and symptom.severity == "note")
    began_before = symptom.step is not None and cause.step is not None and symptom.step < cause.step
    hides_more = cause.severity == "note" and symptom.severity != "note"  # else an alarm would become a note
    return is_meant and not hides_more and not began_before and symptom.detector != cause.detector
