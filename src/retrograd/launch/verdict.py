"""What is said of a run when it has ended."""

from __future__ import annotations

import contextlib
from pathlib import Path

from retrograd.findings.explain import explain
from retrograd.findings.findings import Findings
from retrograd.findings.stored import store_findings
from retrograd.runs.reader import open_run
from retrograd.views.findings_text import count_findings, list_findings

MOST_ROWS = 1_000_000
"""Rows that are looked at while the program ends: about a second of work."""


def find_verdict(run: Path, shown: str) -> str:
    """What follows in the sentence that says how much was recorded.

    Args:
        run: the folder.
        shown: the same as the user wrote it.
    """
    report = f"see it with: retrograd report {shown}"
    try:
        opened = open_run(run)
        rows = opened.history.rows.count
        if rows > MOST_ROWS:
            return f"; what is wrong, if anything, tells: retrograd explain {shown}; {report}"
        findings = explain(opened)
        with contextlib.suppress(OSError):  # it is said all the same
            store_findings(run, findings)
    except Exception as error:  # the program has ended, and a traceback would be taken for its own
        return f"; it could not be explained: {error!r}; {report}"
    return _list(findings, shown) if len(findings) else f"; no findings; {report}"


def _list(findings: Findings, shown: str) -> str:
    lines = [*list_findings(findings), f"more: retrograd explain {shown}"]
    return "\n  ".join([f". {count_findings(findings)}:", *lines])
