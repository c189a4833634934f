"""The example's adjoint by hand is autograd's and the recorded one, and its check finds nothing wrong."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "adjoint_by_hand.py"


def test_what_it_prints_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if re.match(r"the input|block \d's output", line)]
    assert len(lines) == 4
    for line in lines:
        numbers = np.array(re.findall(r"-?\d+\.\d{4}", line), float)
        by_hand, recorded = numbers.reshape(2, 4)
        np.testing.assert_allclose(by_hand, recorded, atol=2e-4)
        assert np.abs(by_hand).max() > 0.01
    assert "7 of 7 comparisons agree; no backward is wrong." in printed


def test_the_hand_is_right() -> None:
    """Against autograd in float64, row by row of the Jacobian."""
    example = runpy.run_path(str(SCRIPT))
    torch.manual_seed(1)
    blocks = torch.nn.Sequential(*(example["Residual"]() for _ in range(3)))
    last = torch.randn(1, 4)
    jacobian = torch.autograd.functional.jacobian(blocks, torch.randn(1, 4)).reshape(4, 4)
    torch.testing.assert_close(example["adjoints_by_hand"](blocks, last)[0], last @ jacobian)
