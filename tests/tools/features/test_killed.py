"""What is on the disk after the worst, and that it goes on from there."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from retrograd.tools.features.folder import list_shards
from retrograd.tools.features.stored import open_features
from tests import warm
from tests.tools.features.killed import BATCH, SAMPLES, make_model, run


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.tools.features.killed", str(folder)]
    return warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def interrupt(folder: Path, how: signal.Signals, after: int, seconds: float = 0.0) -> tuple[list[str], str]:
    """Let a process load so many batches and go on for a moment, then stop it; returns what it printed."""
    process = start(folder)
    assert process.stdout is not None
    first = [process.stdout.readline().strip() for _ in range(after)]
    time.sleep(seconds)
    process.send_signal(how)
    rest, complaint = process.communicate(timeout=60)
    return [*first, *rest.split()], complaint


def compute_whole() -> tuple[torch.Tensor, torch.Tensor]:
    """The features, by the layers themselves."""
    model = make_model()
    x = torch.stack([torch.sin(torch.arange(6.0) * (index + 1)) for index in range(SAMPLES)])
    with torch.no_grad():
        batches = [(model[0](part), model(part)) for part in x.split(BATCH)]
    return torch.cat([first for first, _ in batches]), torch.cat([last for _, last in batches])


def check_whole(folder: Path) -> None:
    features = open_features(folder)
    assert features.is_complete
    assert features.samples == SAMPLES
    first, last = compute_whole()
    assert torch.equal(features["0"][:], first)
    assert torch.equal(features["2"][:], last)
    assert torch.equal(features["target"][:], torch.arange(SAMPLES))


@pytest.mark.slow
def test_killed_at_random_moments_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(0)
    folder = tmp_path / "features"
    first, _ = compute_whole()
    done = [0]
    for after in (1, 25, 12):  # a file holds about eight
        printed, _ = interrupt(folder, signal.SIGKILL, after, chance.uniform(0, 0.03))
        assert int(printed[0]) == done[-1]  # the first batch that was not there
        batches = sum(shard.batches for shard in list_shards(folder))
        assert done[-1] <= batches <= int(printed[-1]) + 1
        done.append(batches)
        if batches:  # what is there can be read, and is right
            features = open_features(folder)
            assert not features.is_complete
            assert torch.equal(features["0"][:], first[: features.samples])
    assert done[-1] > 0
    run(folder, 0.0)
    assert int(capsys.readouterr().out.split()[0]) == done[-1]
    check_whole(folder)
    assert not list(folder.glob(".tmp*"))
    run(folder, 0.0)  # complete: nothing is loaded again
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_loses_no_batch(tmp_path: Path) -> None:
    printed, complaint = interrupt(tmp_path, signal.SIGINT, 12)
    assert "KeyboardInterrupt" in complaint
    batches = sum(shard.batches for shard in list_shards(tmp_path))
    assert int(printed[-1]) - 1 <= batches <= int(printed[-1]) + 1
    run(tmp_path, 0.0)
    check_whole(tmp_path)
