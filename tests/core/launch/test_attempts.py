"""Programs that are begun anew, by themselves or by torchrun: the record is that of one that was never interrupted."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from retrograd.core.runs.reader import open_run
from tests import warm
from tests.commands import ENVIRONMENT, SCRIPTS

TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")


def record(folder: Path, *words: str, rank: str = "0") -> str:
    folder.mkdir()
    command = [sys.executable, "-m", "retrograd", "run", "-o", "run", *words]
    environment = {**ENVIRONMENT, "RANK": rank} if rank != "0" else ENVIRONMENT
    done = warm.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return str(done.stderr)


def assert_same(found: Path, whole: Path, rank: int = 0) -> None:
    """The same rows of one rank, each once, and the same losses."""
    one, other = (open_run(run / "run" / f"rank{rank:05d}").history for run in (found, whole))
    assert one.sites == other.sites
    for site in other.sites:
        for name in ("steps", "rms", "count", "mean"):
            np.testing.assert_array_equal(getattr(one[site], name), getattr(other[site], name), err_msg=site)
    assert one.loss.steps.tolist() == other.loss.steps.tolist() == list(range(6))
    assert one.loss.values.tolist() == other.loss.values.tolist()
    assert sum(map(len, one.all_events.pieces(["step"], ["loss"]))) == 6


@pytest.mark.slow
@pytest.mark.parametrize("saved_at", [4, 2])
def test_a_program_that_becomes_itself(tmp_path: Path, saved_at: int) -> None:
    script = str(SCRIPTS / "attempts.py")
    record(tmp_path / "whole", script, "whole", "9")
    words = record(tmp_path / "twice", script, "exec", str(saved_at))
    assert "Another process" not in words
    assert "retrograd: recorded 6 steps at " in words
    assert [path.name for path in (tmp_path / "twice" / "run").glob("rank*")] == ["rank00000"]
    assert_same(tmp_path / "twice", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("saved_at", [0, 2])
def test_workers_that_torchrun_starts_anew(tmp_path: Path, saved_at: int) -> None:
    script = str(SCRIPTS / "attempts.py")
    for rank in range(2):
        record(tmp_path / f"whole{rank}", script, "whole", "9", rank=str(rank))
    words = record(tmp_path / "twice", *TORCHRUN, script, "killed", str(saved_at))
    assert "Another process" not in words
    assert sorted(path.name for path in (tmp_path / "twice" / "run").glob("rank*")) == ["rank00000", "rank00001"]
    for rank in range(2):
        assert_same(tmp_path / "twice", tmp_path / f"whole{rank}", rank)
    run = open_run(tmp_path / "twice" / "run")
    assert run.status == "finished"
    assert {rank.facts["attempt"]["step"] for rank in run.ranks} == {saved_at}
