"""Findings that a record already has: those kept in its folder, or said while it was made."""

from __future__ import annotations

from pathlib import Path

from retrograd.core.addresses import bounded
from retrograd.core.foreign.text import parse_object
from retrograd.core.history.history import History
from retrograd.core.runs.layout import FINDINGS
from retrograd.core.runs.reader import Run
from retrograd.explaining.findings.finding import Finding, Findings


def read_findings(record: Run | History) -> Findings:
    """Read the findings that are kept in a folder, else those that were said while it was recorded."""
    file = record.path / FINDINGS if isinstance(record, Run) else None
    history = record.history if isinstance(record, Run) else record
    try:
        lines = [] if file is None else _read_lines(file)
        told = lines or [event.text for event in history.few_events if event.kind == "finding"]
        return Findings([Finding.of_dict(parse_object(line)) for line in told], about="the record so far")
    except (OSError, ValueError, TypeError):
        return Findings(about="the record so far")


@bounded
def _read_lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
