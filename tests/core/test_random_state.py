"""No import and no call of ours moves a random generator of the program: Python's, NumPy's or torch's."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from retrograd.core.randomness import random_kept

ROOT = Path(__file__).parents[2]


def test_no_public_name_moves_a_generator(tmp_path: Path) -> None:
    """Of a name that has no use there, it fails."""
    words = [sys.executable, "-m", "tests.every_name", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


@pytest.mark.parametrize("error", [None, ValueError])
def test_what_is_drawn_inside_is_drawn_again_behind(error: type[Exception] | None) -> None:
    try:
        with random_kept():
            inside = random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002
            if error is not None:
                raise error
    except ValueError:
        pass
    assert (random.random(), np.random.rand(), torch.rand(())) == inside  # noqa: NPY002


@pytest.mark.gpu
def test_generators_of_a_gpu_are_kept_too() -> None:
    torch.cuda.init()
    with random_kept():
        inside = torch.rand((), device="cuda")
    assert torch.equal(torch.rand((), device="cuda"), inside)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_nothing_is_loaded_for_it(library: str) -> None:
    code = (
        "import sys; from retrograd.core.randomness import random_kept\n"
        f"with random_kept(): assert '{library}' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_library_that_is_loaded_inside_may_be_drawn_from() -> None:
    code = (
        "from retrograd.core.randomness import random_kept\n"
        "with random_kept(): import torch, numpy; torch.rand(()); numpy.random.rand()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
