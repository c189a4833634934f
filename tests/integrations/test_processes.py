"""Scripts in processes of their own: two under each trainer, which reduce gradients by gloo, and one that raises."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import retrograd as rg
from tests import warm
from tests.integrations.nets import train_plainly

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "strategy", "first"),
    [
        ("lightning", "ddp", 0),
        ("lightning", "ddp_spawn", 0),
        ("lightning", "fsdp2", 0),
        ("transformers", "", 1),
        ("transformers", "fsdp2", 1),
        ("accelerate", "first", 0),
    ],
    ids=str,
)
def test_two_ranks_are_one_run(library: str, strategy: str, first: int, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script = str(SCRIPTS / f"{library}_ddp.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    starts_its_own = library == "lightning"
    done = run(tmp_path, *([] if starts_its_own else torchrun), script, *strategy.split())
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "runs").iterdir()
    together = rg.open_run(path)
    assert [rank.rank for rank in together.ranks] == ([0] if strategy == "first" else [0, 1])
    assert together.status == "finished"
    assert done.stderr.count("retrograd: recording to") == 1
    assert done.stderr.count("retrograd: recorded 8 steps") == 1
    # the ranks have halves of the same four examples, so the mean of their gradients is that of the whole
    expected = train_plainly()["net.2:weight.grad"]
    found = together.history["net.2:weight.grad"]
    assert list(found.steps) == list(range(first, first + 8))
    np.testing.assert_allclose(found.rms, expected.rms, rtol=1e-4)
    if strategy == "first":
        assert "1 rank (only rank 0 of 2 recorded)" in repr(together)
    else:
        assert len(together.history["net:output"].select(rank=1).steps) == 8


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "kind"), [("error", "ValueError"), ("interrupt", "KeyboardInterrupt")])
def test_an_exception_that_ends_the_process_is_recorded_under_transformers(
    argument: str, kind: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    done = run(tmp_path, str(SCRIPTS / "transformers_raises.py"), argument)
    assert done.returncode != 0
    assert kind in done.stderr
    left = rg.open_run(tmp_path / "run")
    assert left.status == "failed"
    assert left.ranks[0].facts["error"]["kind"] == kind
    assert list(left.history["net.0:output"].steps) == [1, 2, 3]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, *words],
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
