"""What the loggers of a trainer write to, where it has a place for a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from retrograd.core.runs.findings import Finding, Findings, list_place, tell_repair

Board = Any
"""TensorBoard's writer, a run of W&B, or anything else, which takes no text from us."""

_MOST_LETTERS = 63
"""Letters of a title that W&B takes."""


def write_text(board: Board, findings: Iterable[Finding], step: int) -> None:
    """Write findings at a step of training, where the board is TensorBoard's."""
    if hasattr(board, "add_text"):
        lines = str(Findings(findings)).splitlines()
        board.add_text("retrograd/findings", "\n".join(f"- {line}" for line in lines), step)


def send_alert(board: Board, finding: Finding) -> None:
    """Send an alert, where the board is of W&B, which sends it on to people."""
    if type(board).__module__.partition(".")[0] == "wandb":
        parts = (str(finding), ", ".join(list_place(finding)), tell_repair(finding))
        title = f"retrograd: {finding.detector}"[:_MOST_LETTERS]
        board.alert(title, "\n\n".join(part for part in parts if part), level="ERROR")
