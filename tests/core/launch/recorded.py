"""What a script did when it was run twice, bare and recorded."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

HEALTHY = "no findings; N of M checks applied; what it did: retrograd explain run; see it with: retrograd report run"
"""How our last line ends, as ``uncounted`` has it."""


def uncounted(words: str) -> str:
    """Our words without the number of checks."""
    return re.sub(r"\d+ of \d+ checks", "N of M checks", words)


@dataclass(frozen=True)
class Command:
    """A command to be recorded; words that end in ``.py`` are scripts of ours.

    Attributes:
        line: the command.
        options: options of ``retrograd run``.
        filters: what PYTHONWARNINGS is to be.
    """

    line: str
    options: str = ""
    filters: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.options, self.line, self.filters) if part)


def recorded(*lines: str, options: str = "", filters: str = "") -> pytest.MarkDecorator:
    """Decorator: the test gets the ``outcome`` of each of these commands."""
    commands = [Command(line, options, filters) for line in lines]
    return pytest.mark.parametrize("outcome", commands, indirect=True, ids=str)


@dataclass
class Outcome:
    """What a command did when it was recorded; bare, it did the same.

    Attributes:
        code: its exit code; negative for a signal.
        output: what it wrote to stdout.
        words: what we wrote to stderr, line by line.
        warnings: how many of our warnings stand there too.
        run: the run folder.
    """

    code: int
    output: str
    words: list[str]
    warnings: int
    run: Path

    def rows(self, rank: str = "rank00000") -> list[dict[str, Any]]:
        """Rows of statistics, read without us."""
        return self._read("statistics", rank)

    def events(self, kind: str, rank: str = "rank00000") -> list[dict[str, Any]]:
        return [row for row in self._read("events", rank) if row["kind"] == kind]

    def sites(self, rank: str = "rank00000") -> set[str]:
        return {row["site"] for row in self.rows(rank)}

    def moments(self, phase: str = "train", rank: str = "rank00000") -> list[tuple[int, int]]:
        """Steps and micro-batches, in order."""
        return sorted({(row["step"], row["micro"]) for row in self.rows(rank) if row["phase"] == phase})

    def ranks(self) -> list[str]:
        return sorted(path.name for path in self.run.glob("rank*"))

    def status(self, rank: str = "rank00000") -> str:
        return str(json.loads((self.run / rank / "rank.json").read_text())["status"])

    def error(self, rank: str = "rank00000") -> dict[str, Any] | None:
        error: dict[str, Any] | None = json.loads((self.run / rank / "rank.json").read_text())["error"]
        return error

    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "manifest.json").read_text()))

    def _read(self, table: str, rank: str) -> list[dict[str, Any]]:
        parts = sorted((self.run / rank / table).glob("part-*.parquet"))
        return [row for part in parts for row in pq.read_table(part).to_pylist()]


def steps(count: int, micros: int = 1) -> list[tuple[int, int]]:
    """Steps and micro-batches of a run that has so many of them."""
    return [(step, micro) for step in range(count) for micro in range(micros)]


def outputs(*paths: str) -> set[str]:
    """Sites of the outputs of these modules, and of their gradients."""
    return {f"{path}:output{tail}" for path in paths for tail in ("", ".grad")}


def parameters(*paths: str, names: tuple[str, ...] = ("weight", "bias"), update: bool = True) -> set[str]:
    """Sites of the gradients and updates of the parameters of these modules."""
    tails = (".grad", ".update") if update else (".grad",)
    return {f"{path}:{name}{tail}" for path in paths for name in names for tail in tails}
