"""Where all files are used up, or the disk is full, what was recorded is there, or every answer says what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import retrograd as rg
from retrograd.core.runs.listing import read_line
from retrograd.core.views.report.report import build_page
from tests.commands import ENVIRONMENT, run

SCRIPT = """
import os, resource, signal, sys, time
import torch
from torch import nn

net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
limit, first = sys.argv[1], int(sys.argv[2])

def use_up():
    if limit == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
    else:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))

held = []
for step in range(60):
    if step == first:
        time.sleep(2.5 if step else 0)  # so that some rows are written
        use_up()
    optimizer.zero_grad()
    net(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
print("trained")
"""


def record(folder: Path, *words: str) -> list[str]:
    """What the command says of itself on stderr."""
    (folder / "train.py").write_text(SCRIPT)
    ours = [sys.executable, "-m", "retrograd", "run", "-o", "run", "train.py", *words]
    code, output, errors = run(ours, folder, ENVIRONMENT, subprocess.Popen)
    assert (code, output) == (0, "trained\n"), errors
    return [line for line in errors.splitlines() if line.startswith("retrograd: ")]


@pytest.mark.parametrize("first", ["0", "3"])
def test_a_program_that_has_used_up_all_files_is_recorded_whole(tmp_path: Path, first: str) -> None:
    said = record(tmp_path, "files", first)
    assert said[-1].startswith("retrograd: recorded 60 steps at "), said
    run = rg.open_run(tmp_path / "run")
    assert (run.status, run.missing) == ("finished", "")
    assert run.history["self:output"].steps.tolist() == list(range(60))


def test_all_answers_say_which_rows_a_full_disk_has_cost(tmp_path: Path) -> None:
    said = record(tmp_path, "disk", "3")
    found = rg.open_run(tmp_path / "run")
    lost = 60 * len(found.history.sites) - found.history.rows.count
    assert lost > 0
    assert f"recorded 60 steps at {len(found.history.sites)} sites, but {lost} rows" in said[-1]
    missing = f"without {lost} of {60 * len(found.history.sites)} rows"
    assert missing in rg.explain(found).headline
    assert missing in build_page(found)
    assert read_line(tmp_path / "run").lost == lost
    for words in (["explain"], ["view"]):
        answer = run([sys.executable, "-m", "retrograd", *words, "run"], tmp_path)[1]
        assert missing in answer.splitlines()[0]
