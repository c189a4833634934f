"""The last words about a run that has ended: ``python -m retrograd.launch.verdict RUN SHOWN``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from retrograd.amounts import count_of
from retrograd.files import to_utf8
from retrograd.findings.explain import explain
from retrograd.findings.findings import Findings
from retrograd.findings.stored import store_findings
from retrograd.launch.lean import keep_pandas_out
from retrograd.runs.reader import open_run
from retrograd.views.findings_text import list_findings

MOST_ROWS = 1_000_000
"""Rows that are looked at while the program ends: about a second of work."""


def find_verdict(run: Path, shown: str) -> str:
    """Find the words that follow in the sentence about how much was recorded.

    Args:
        run: the folder.
        shown: the same as the user wrote it.
    """
    report = f"see it with: retrograd report {shown}"
    opened = open_run(run)
    if opened.history.rows.count > MOST_ROWS:
        return f"; what is wrong, if anything, tells: retrograd explain {shown}; {report}"
    findings = explain(opened)
    with contextlib.suppress(OSError):  # it is said all the same
        store_findings(run, findings)
    return _list(findings, shown) if len(findings) else f"; no findings; {report}"


def _list(findings: Findings, shown: str) -> str:
    lines = [*list_findings(findings), f"more: retrograd explain {shown}"]
    return "\n  ".join([f". {count_of(len(findings), 'finding')}:", *lines])


if __name__ == "__main__":
    keep_pandas_out()
    sys.stdout.buffer.write(to_utf8(find_verdict(Path(sys.argv[1]), sys.argv[2])))
