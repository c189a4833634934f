"""A run is mirrored by a process beside its program: once, whole, and however the program ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import retrograd as rg
from tests import warm
from tests.commands import ENVIRONMENT, SCRIPTS, run
from tests.core.exports.offline import read_records, read_series

TRAINS = """
import sys
import torch
torch.manual_seed(0)
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    net(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
print("trained", flush=True)
sys.stdin.readline()
"""


def mirrored(folder: Path, *words: str, to: str = "tensorboard", **variables: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a program that is mirrored; its run is in ``run``."""
    ours = [sys.executable, "-m", "retrograd", "run", "--mirror", to, "-o", "run"]
    return run([*ours, *words], folder, {**ENVIRONMENT, **variables})


def check_board(folder: Path, steps: Sequence[int]) -> None:
    """There is one board, with the losses of these steps, and the rms of each gradient of a weight, as recorded."""
    (file,) = (folder / "run").rglob("*tfevents*")
    board = EventAccumulator(str(file), {"scalars": 0}).Reload()
    found = {tag: {event.step: event.value for event in board.Scalars(tag)} for tag in board.Tags()["scalars"]}
    history = rg.open_run(folder / "run").history
    sites = history.select("*:weight.grad")
    assert set(found) == {*history.scalars, *(f"rms/{site}" for site in sites)}
    for name in {"loss", *found} - {*history.scalars} | {"loss"}:
        values = found[name]
        series = history.loss if name == "loss" else history[name.removeprefix("rms/")]
        expected = history.loss.values if name == "loss" else history[name.removeprefix("rms/")].rms
        assert list(values) == series.steps.tolist() == list(steps)
        np.testing.assert_allclose(list(values.values()), expected, rtol=1e-6)


def test_two_ranks_have_one_mirror(tmp_path: Path) -> None:
    script = str(SCRIPTS / "ddp.py")
    code, _, errors = mirrored(tmp_path, "torchrun", "--standalone", "--nproc-per-node", "2", script)
    assert code == 0, errors
    assert errors.count("retrograd: live in tensorboard") == 1
    assert "retrograd: tensorboard was sent 3 steps" in errors
    check_board(tmp_path, range(3))


def test_ranks_that_are_started_one_by_one_have_one_mirror(tmp_path: Path) -> None:
    """As `srun retrograd run …` does it: each of them has a mirror of its own to begin with."""
    variables = {"WORLD_SIZE": "2"}
    (tmp_path / "trains.py").write_text(TRAINS)
    ours = [sys.executable, "-m", "retrograd", "run", "-q", "--mirror", "tensorboard", "-o", "run", "trains.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    programs = [
        warm.Popen(ours, cwd=tmp_path, env={**ENVIRONMENT, **variables, **rank}, **pipes)
        for rank in ({"RANK": "0"}, {"RANK": "1"})
    ]
    for program in programs:
        assert program.stdout.readline() == "trained\n"
    for program in programs:
        program.stdin.write("\n")
        program.stdin.flush()
    for program in programs:
        assert program.communicate(timeout=100) == ("", "")
    check_board(tmp_path, range(5))


def test_a_process_that_forks_has_one_mirror(tmp_path: Path) -> None:
    code, _, errors = mirrored(tmp_path, str(SCRIPTS / "forked.py"))
    assert code == 0, errors
    check_board(tmp_path, range(3))  # what forked children train is recorded beside the run


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_what_was_recorded_is_told_however_the_program_ends(ending: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    ours = [sys.executable, "-m", "retrograd", "run", "--mirror", "tensorboard", "-o", "run", "trains.py"]
    with warm.Popen(
        ours,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        assert program.stdout.readline() == "trained\n"
        while not list((tmp_path / "run").glob("rank00000/statistics/[!.]*.parquet")):
            signal.sigtimedwait([], 0.05)
        os.killpg(program.pid, ending)  # as a terminal does it
        errors = program.communicate(timeout=100)[1]  # until the mirror has ended, too
        assert program.returncode == -ending
    steps = rg.open_run(tmp_path / "run").history.loss.steps
    check_board(tmp_path, steps)
    assert f"tensorboard was sent {len(steps)} steps" in errors


def test_a_program_that_trains_nothing_is_not_held_up_and_has_no_mirror(tmp_path: Path) -> None:
    code, _, errors = mirrored(tmp_path, str(SCRIPTS / "untrained.py"))
    assert code == 0
    assert "live in" not in errors
    assert not (tmp_path / "run").exists()


def test_a_library_that_is_too_old_is_told_before_the_program_runs(tmp_path: Path) -> None:
    about = tmp_path / "old" / "wandb-0.1.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 0.1\n")
    shutil.copy(SCRIPTS / "toy.py", tmp_path)
    path = f"{tmp_path / 'old'}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    ours = [sys.executable, "-m", "retrograd", "run", "--mirror", "wandb", "-o", "run"]
    environment = {**ENVIRONMENT, "PYTHONPATH": path}  # read where an interpreter begins
    code, output, errors = run([*ours, str(SCRIPTS / "plain_loop.py")], tmp_path, environment, subprocess.Popen)
    assert (code, output) == (2, "")
    assert "wandb 0.1 is installed, and 0.19.10 or newer is needed" in errors
    assert "pip install 'retrograd[trackers]' -U" in errors


def test_a_tracker_that_cannot_be_reached_is_told_and_training_goes_on(tmp_path: Path) -> None:
    code, output, errors = mirrored(
        tmp_path, str(SCRIPTS / "plain_loop.py"), to="wandb", HOME=str(tmp_path), WANDB_MODE="online", WANDB_API_KEY=""
    )
    assert code == 0
    assert output
    assert "retrograd: the run is not mirrored to wandb: No API key configured" in errors


def test_a_run_of_wandb_beside_that_of_the_program(tmp_path: Path) -> None:
    """Variables that name the program's own run, as its agents set them, do not name ours."""
    variables = {"WANDB_RUN_ID": "theirs", "WANDB_SWEEP_ID": "sweep", "WANDB_RESUME": "must", "WANDB_MODE": "offline"}
    code, _, errors = mirrored(tmp_path, str(SCRIPTS / "plain_loop.py"), to="wandb", **variables)
    assert code == 0
    assert "retrograd: live in wandb, while it runs: wandb sync " in errors
    records = read_records(tmp_path / "run" / "wandb")
    (about,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert about.run_id != "theirs"
    assert (about.project, about.display_name, about.sweep_id) == ("retrograd", "run", "")
    losses = read_series(records)["loss"]
    history = rg.open_run(tmp_path / "run").history
    np.testing.assert_allclose(list(losses.values()), history.loss.values)
