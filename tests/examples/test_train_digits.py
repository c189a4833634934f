"""The example is what it says it is: an ordinary script, repeatable, and good at its task."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from tests import warm

SCRIPT = Path(__file__).parents[2] / "examples" / "train_digits.py"


def train(checkpoint: Path, *options: str) -> str:
    """Run the script in a process of its own; returns what it printed."""
    command = [sys.executable, str(SCRIPT), "--checkpoint", str(checkpoint), *options]
    return warm.run(command, check=True, capture_output=True, text=True).stdout


def test_it_knows_nothing_of_us() -> None:
    assert "retrograd" not in SCRIPT.read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [])
        + ([str(node.module)] if isinstance(node, ast.ImportFrom) else [])
    }
    assert imported == {"__future__", "argparse", "pathlib", "sklearn", "torch"}


@pytest.mark.slow
def test_a_seed_makes_it_repeatable(tmp_path: Path) -> None:
    options = ("--epochs", "1", "--width", "4", "--seed", "3")
    first, second = train(tmp_path / "a.pt", *options), train(tmp_path / "b.pt", *options)
    assert first.replace("a.pt", "b.pt") == second
    weights = [torch.load(tmp_path / name, weights_only=True)["model"] for name in ("a.pt", "b.pt")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.slow
def test_it_learns_to_tell_digits(tmp_path: Path) -> None:
    printed = train(tmp_path / "digits.pt", "--epochs", "6", "--width", "16")
    assert float(re.findall(r"accuracy ([\d.]+)%", printed)[-1]) > 97
