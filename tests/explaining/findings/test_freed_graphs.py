"""What a refused pass is said to be refused for, by the program's own lines; and that what is advised trains on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.explain import explain
from tests import warm

ONCE = """
import torch
torch.manual_seed(0)
W = torch.randn(5, 5, requires_grad=True)
prob = W.exp() / W.exp().sum(1, keepdim=True)  # made
opt = torch.optim.SGD([W], lr=0.1)
for step in range(3):
    loss = -prob[torch.arange(5), torch.randint(5, (5,))].log().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(float(W.sum()))
"""

ONCE_IN_A_FUNCTION = """
import torch
from torch import nn
table, head = nn.Embedding(10, 8), nn.Linear(8, 1)
opt = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)

def train(features):
    loss = head(features).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

def main():
    features = table(torch.arange(10)).tanh()  # made
    for step in range(3):
        train(features)
main()
"""

FEATURES = """
import torch
from torch import nn
torch.manual_seed(0)
table, head = nn.Embedding(5, 8), nn.Linear(8, 8)
opt = torch.optim.Adam([*table.parameters(), *head.parameters()], 1e-2)
base = 2 * table.weight
base = base.tanh()
before = table.weight.detach().clone()
for step in range(4):
    loss = (head(base) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
assert not torch.equal(before, table.weight)
"""

CARRIED = """
import torch
from torch import nn
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
mean = torch.zeros(4)
for step in range(3):
    average = 0.9 * mean + net(torch.randn(2, 4)).mean(0)
    loss = average.square().sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    mean = average
"""


def run(path: Path, program: str, name: str = "run") -> subprocess.CompletedProcess[str]:
    (path / "train.py").write_text(program)
    command = [sys.executable, "-m", "retrograd", "run", "--quiet", "-o", name, "train.py"]
    return warm.run(command, cwd=path, capture_output=True, text=True, timeout=120)


def find(path: Path, program: str) -> Finding:
    assert "a second time" in run(path, program).stderr
    (found,) = explain(path / "run").of("freed-graph")
    return found


def made(program: str) -> str:
    return f"train.py:{next(number for number, line in enumerate(program.splitlines(), 1) if '# made' in line)}"


@pytest.mark.parametrize(("program", "name"), [(ONCE, "prob"), (ONCE_IN_A_FUNCTION, "features")])
def test_what_is_made_once_before_the_loop_is_named_with_its_line(tmp_path: Path, program: str, name: str) -> None:
    found = find(tmp_path, program)
    assert f"`{name}` ({made(program)}), made once before the loop, is used again" in found.message
    assert f"compute `{name}` again in each step" in found.repair.lower()


def test_detach_is_not_advised_where_nothing_would_be_trained(tmp_path: Path) -> None:
    found = find(tmp_path, ONCE)
    assert "nothing is trained if it is detached" in found.repair
    anew = ONCE.replace(
        "for step in range(3):\n", "for step in range(3):\n    prob = W.exp() / W.exp().sum(1, keepdim=True)\n"
    )
    done = run(tmp_path, anew, "anew")  # the remedy
    assert done.returncode == 0, done.stderr
    assert not explain(tmp_path / "anew").of("freed-graph")


def test_detach_is_not_advised_where_a_parameter_would_get_nothing(tmp_path: Path) -> None:
    found = find(tmp_path, FEATURES)
    assert found.repair == "compute `base` again in each step: table:weight gets no gradient from it if it is detached."
    detached = FEATURES.replace("base.tanh()", "base.tanh().detach()")
    assert "AssertionError" in run(tmp_path, detached, "detached").stderr  # it trains, but for the table
    (missing,) = explain(tmp_path / "detached").of("missing-gradient")
    assert "used without a call, compute what is made of them in each step, and do not detach it" in missing.repair
    anew = FEATURES.replace("    loss =", "    base = (2 * table.weight).tanh()\n    loss =")
    done = run(tmp_path, anew, "anew")
    assert done.returncode == 0, done.stderr
    assert not {"freed-graph", "missing-gradient"} & {each.detector for each in explain(tmp_path / "anew")}


def test_a_state_that_is_carried_on_is_detached(tmp_path: Path) -> None:
    found = find(tmp_path, CARRIED)
    assert "`mean`" in found.message
    assert "made once" not in found.message
    assert "detach" in found.repair.lower()
    assert run(tmp_path, CARRIED.replace("mean = average", "mean = average.detach()"), "anew").returncode == 0
