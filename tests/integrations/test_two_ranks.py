"""Two processes under each trainer, which reduce gradients by gloo: one run, a folder a rank."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import retrograd as rg
from tests.integrations.nets import train_plainly

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "first"), [("lightning", 0), ("transformers", 1), ("accelerate", 0)], ids=lambda value: str(value)
)
def test_two_ranks_are_one_run(library: str, first: int, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script = str(SCRIPTS / f"{library}_ddp.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *([] if library == "lightning" else torchrun), script],
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "runs").iterdir()
    run = rg.open_run(path)
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert run.status == "finished"
    assert done.stderr.count("retrograd: recording to") == 1
    assert done.stderr.count("retrograd: recorded 8 steps") == 1
    # each rank has half of a batch, so the mean of their gradients is that of the whole
    expected = train_plainly()["net.2:weight.grad"]
    found = run.history["net.2:weight.grad"]
    assert list(found.steps) == list(range(first, first + 8))
    if library == "lightning":  # its sampler deals batches out one by one
        assert len(found.rms) == 8
    else:
        np.testing.assert_allclose(found.rms, expected.rms, rtol=1e-4)
    assert run.history["net:output"].select(rank=1).calls is not None
