"""The core alone: records, reads and shows a run where no other part of the house is there."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import warm

PROGRAM = """
import importlib.abc, sys

WINGS = {wings!r}

class Nowhere(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"retrograd.{{wing}}" for wing in WINGS)):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nowhere())
import torch
import retrograd as rg

net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
norms = []
with rg.record(net, "run"):
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).square().mean().backward()
        norms.append(net[0].weight.grad.double().norm().item())
        optimizer.step()
run = rg.open_run("run")
seen = run.history["0:weight.grad"].l2.tolist()
assert len(seen) == 3 and all(abs(a - b) <= 1e-6 * b for a, b in zip(seen, norms)), (seen, norms)
rg.write_report(run)
rg.print_table(run)
from retrograd.core.cli import main
assert main(["view", "run"]) == 0
wings = [name for name in sys.modules if name.startswith(tuple(f"retrograd.{{wing}}" for wing in WINGS))]
assert not wings, wings
"""


def test_the_core_records_and_shows_without_any_other_part(tmp_path: Path) -> None:
    program = PROGRAM.format(wings=("explaining", "following", "memory", "rewriting", "tools"))
    done = warm.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300, stage="torch"
    )
    assert done.returncode == 0, done.stderr
    assert "is not installed" in done.stdout  # that nobody explains it is said
    assert (tmp_path / "run" / "report.html").stat().st_size > 50_000
