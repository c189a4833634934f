"""What runs on a device that is lent by the minute has run here before."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests import warm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


JUDGE = ["build", "tests", "waits", "twins", "capture", "streams"]
MEASURE = ["cost", "budget"]
"""They say how long something takes, which only a device's minutes are lost by when it raises."""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a device")
@pytest.mark.parametrize("parts", [JUDGE, pytest.param(MEASURE, marks=pytest.mark.thorough)], ids=["judge", "measure"])
def test_every_part_runs_in_small_without_a_device(parts: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--out", str(tmp_path), "--minutes", "4", "--only", *parts]
    done = warm.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    together = done.stdout.partition("## Together")[2]
    assert [line.split(":")[0] for line in together.splitlines() if ": done, " in line] == parts
    if parts is JUDGE:
        assert "holds: 2 compiled modules" in together
        assert together.count("holds: torch.float16") == 8
        assert "compiled: losses within" in together
    else:
        assert "so it holds" in done.stdout  # a budget was looked for, kept and measured
    assert (tmp_path / "gpu.md").read_text() == done.stdout
    assert "round 1 of" not in done.stdout  # progress


def test_all_parts_are_tried(script: ModuleType) -> None:
    assert {part.name for part in script.PARTS} == {*JUDGE, *MEASURE}


def test_a_part_that_hangs_ends_at_its_limit_and_what_it_has_said_is_kept(script: ModuleType, tmp_path: Path) -> None:
    program = "import subprocess, sys; print('holds: it began', flush=True); subprocess.run(['sleep', '60'])"
    part = script.Part("hangs", "", 1, ("-c", program))
    report = script.Report(tmp_path / "gpu.md")
    began = time.monotonic()
    end, verdicts = script.run_part(part, report, 5.0, small=True)
    assert time.monotonic() - began < 50  # what it had started holds its output too, and ended with it
    assert end == "killed, at its limit of 5 s or for memory"
    assert verdicts == ["holds: it began"]
    assert "it began" in report.path.read_text()


def test_a_verdict_that_fails_or_a_part_that_does_makes_all_fail(script: ModuleType, tmp_path: Path) -> None:
    report = script.Report(tmp_path / "gpu.md")
    good = script.Part("good", "", 20, ("-c", "print('holds: yes')"))
    for bad in ("print('FAILS: no')", "raise SystemExit(3)"):
        assert not script.run_all([script.Part("bad", "", 20, ("-c", bad)), good], report, 1.0, small=True)
    assert script.run_all([good], report, 1.0, small=True)
