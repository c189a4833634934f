"""What is said of a record that is too long for an answer at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.errors import TableSizeError
from retrograd.core.limits import LIMITS
from retrograd.core.runs.findings import Finding, Findings, read_last_findings, store_findings
from retrograd.core.runs.layout import FINDINGS
from tests.core.runs.written import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", range(6))


@pytest.mark.parametrize("held", [0, 1 << 18])
def test_a_table_that_is_too_large_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    monkeypatch.setattr(LIMITS, "held_rows", held)
    history = rg.open_run(run).history
    size = history.table().nbytes
    monkeypatch.setattr(LIMITS, "table_bytes", size // 2)
    for ask in (history.table, history.to_arrow, history.to_pandas, history.to_polars):
        with pytest.raises(
            TableSizeError, match=r"All 30 rows .*\n.*matrix.*only.*to_batches.*LIMITS.table_bytes"
        ) as said:
            ask()
        assert said.value.slug == "table-too-large"
    assert history.to_batches().read_all().num_rows == 30
    monkeypatch.setattr(LIMITS, "table_bytes", 2 * size)
    assert history.table().num_rows == 30


def test_findings_are_those_last_looked_for_unless_rows_came_since(run: Path) -> None:
    opened = rg.open_run(run)
    assert (
        "nothing was checked: that takes seconds for 30 rows; ask: retrograd explain"
        in read_last_findings(opened).headline
    )
    store_findings(run, Findings([Finding(detector="dead-units", severity="warning", message="Half are dead.")]))
    assert [str(each) for each in read_last_findings(opened)] == ["Half are dead"]
    os.utime(run / FINDINGS, (1, 1))
    assert not len(read_last_findings(opened))


def test_a_long_run_is_viewed_as_a_screenful(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LIMITS, "explained_rows", 0)
    monkeypatch.setattr(LIMITS, "shown_sites", 1)
    assert main(["view", str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].startswith("nothing was checked: ")
    assert shown.splitlines()[-1] == "2 more sites: retrograd view --all"
    assert main(["view", str(run), "--all"]) == 0
    assert "b:weight" in capsys.readouterr().out
    assert main(["view", str(run), "--sites", "*:outputs"]) == 0
    assert "more site" not in capsys.readouterr().out
