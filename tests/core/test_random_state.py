"""No use of a public name leaves anything behind: no generator is moved (Python's, NumPy's, torch's), and nothing is
loaded that only compiled code needs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrograd.core.randomness import random_kept

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the uses of all public names have left. Of a name that has no use there, it fails."""
    words = [sys.executable, "-m", "tests.every_name", str(tmp_path_factory.mktemp("names"))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_no_public_name_moves_a_generator(left_behind: dict[str, Any]) -> None:
    assert left_behind["moved"] == {}


def test_no_public_name_loads_what_only_compiled_code_needs(left_behind: dict[str, Any]) -> None:
    """Neither a module of ``retrograd.compiled`` nor an operation in torch's dispatcher, used on an eager net."""
    assert left_behind["compiled"] == {}
    assert any(name.startswith("retrograd::tap") for name in left_behind["control"]), "it would be found"


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
