"""The options of ``retrograd explain``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from retrograd.core.launch.options import Command, option
from retrograd.core.launch.start import make_usage


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(Command):
    """The options of ``retrograd explain``: what to explain, and how."""

    name: ClassVar[str] = "explain"
    runs: ClassVar[bool] = True
    takes_run: ClassVar[bool] = True
    reads: ClassVar[bool] = True
    usage: ClassVar[str] = make_usage("explain", "[RUN]")
    examples: ClassVar[str] = """
examples:
  retrograd explain                                      the newest run below runs/
  retrograd explain runs/train-20250131-120000 -v        with the evidence
  retrograd explain runs/first --json --fail-on warning  JSON lines, and an exit code for CI
  retrograd explain runs/first --format sarif > log.sarif
  retrograd explain runs/first --card                    what it did, without what is wrong
  retrograd explain train.py --lr 0.1                    run it, watched closely, and explain what it did
  retrograd explain --steps 20 -m package.train          no longer than 20 steps

A run is explained from its record alone. A command is run, and watched more closely than `retrograd run` does: also
writes to what autograd has saved, where exactly NaN is made, and points without a derivative. The exit code is that of
the command, or 0 for a run; 1 where --fail-on says so; 2 for an error of usage. Everything after the script is passed
to it.
"""

    command: tuple[str, ...] = ()
    run: Path | None = option("RUN", None, "folder of a run (default: the newest)")
    verbose: bool = option("-v --verbose", False, "add the evidence for each finding, and what it explains")
    all: bool = option("--all", False, "all findings (default: at most five)")
    not_checked: bool = option("--not-checked", False, "what could not be checked, and why")
    card: bool = option("--card", False, "what the run did, alone: nothing is checked")
    format: Literal["text", "json", "github", "sarif"] = option(
        "--format",
        "text",
        "all findings as lines of JSON (with --card the card, as an object), as annotations of GitHub Actions, or in "
        "SARIF 2.1.0",
        group="form",
    )
    json: bool = option("--json", False, "the same as --format json", group="form")
    schema: bool = option("--schema", False, "print the JSON schema of --format json, and nothing else", group="form")
    fail_on: Literal["critical", "warning", "note"] | None = option(
        "--fail-on", None, "exit with 1 if a finding is this severe, or worse"
    )
    steps: int | None = option("--steps", None, "of a command: stop it after N steps", metavar="N")
    output: str | None = option("-o --output", None, "of a command: run folder, as for `retrograd run`", metavar="DIR")

    @property
    def form(self) -> str:
        """The format that is asked for."""
        return "json" if self.json else self.format
