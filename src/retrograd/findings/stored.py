"""Findings in the folder of a run: one line of JSON each, for other tools."""

from __future__ import annotations

from pathlib import Path

from retrograd.files import to_utf8, write_whole
from retrograd.findings.findings import Findings
from retrograd.runs.layout import FINDINGS


def store_findings(run: Path, findings: Findings) -> None:
    """Write all of them, the worst first.

    Raises:
        OSError: the folder cannot be written.
    """
    with write_whole(run / FINDINGS) as file:
        file.write(to_utf8(findings.as_json_lines()))
