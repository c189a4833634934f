"""What torch refuses, told with the program's own lines; and each remedy, applied to the program that was refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.explain import explain
from tests import warm

ROUTER = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.fc = nn.Linear(8, 2), nn.Linear(8, 8)
        self.register_buffer("bias", torch.zeros(2))
    def balance(self):
        with torch.no_grad():
            self.bias += torch.tensor([0.4, -0.4])  # wrote
    def forward(self, x):
        pick = (self.gate(x) + self.bias).argmax(-1)
        self.balance()  # inside
        rows = (pick == 0).nonzero().flatten()
        y = self.fc(x[rows]).relu()  # differs
        return torch.zeros_like(x).index_add(0, rows, y)
net = nn.Sequential(nn.Linear(8, 8), Router(), nn.Linear(8, 1))
for step in range(2):
    loss = net[2](checkpoint(net[1], net[0](torch.randn(32, 8)), use_reentrant=False)).square().mean()
    loss.backward()
"""

COUNTER = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.calls = nn.Linear(8, 8), 1
    def forward(self, x):
        self.calls += 1
        return self.fc(x[: self.calls]).relu().sum()
net, x = Growing(), torch.randn(32, 8, requires_grad=True)
net.fc(x)
checkpoint(net, x, use_reentrant=False).backward()
"""

INFERENCE = """
import torch
from torch import nn
backbone, head = nn.Linear(8, 8), nn.Linear(8, 1)
net = nn.ModuleList([backbone, head])
opt = torch.optim.SGD(head.parameters(), lr=0.1)
for step in range(4):
    with torch.inference_mode():
        features = backbone(torch.randn(4, 8)).relu()
    loss = head(features).square().mean()  # used
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

DDP = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", init_method="file://STORE", rank=0, world_size=1)
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.spare, self.b = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
    def forward(self, x):
        h = self.a(x).relu()
        return self.b(h) + 0 * self.spare(h).argmax(-1, keepdim=True)  # cuts
net = nn.parallel.DistributedDataParallel(Net())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    loss = net(torch.randn(4, 4)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
"""


def run(path: Path, program: str, name: str = "run") -> int:
    (path / "train.py").write_text(program.replace("STORE", str(path / f"{name}.store")))
    command = [sys.executable, "-m", "retrograd", "run", "--quiet", "-o", name, "train.py"]
    return warm.run(command, cwd=path, capture_output=True, text=True, timeout=120).returncode


def find(path: Path, program: str, slug: str) -> Finding:
    assert run(path, program) == 1
    found = explain(path / "run")
    assert not [each for each in found if each.detector == "failed"]
    (told,) = found.of(slug)
    return told


def place(program: str, mark: str) -> str:
    return f"train.py:{next(number for number, line in enumerate(program.splitlines(), 1) if f'# {mark}' in line)}"


def test_a_checkpoint_that_writes_to_what_it_reads(tmp_path: Path) -> None:
    found = find(tmp_path, ROUTER, "recomputed-otherwise")
    assert found.line.endswith(place(ROUTER, "wrote"))
    assert f"({place(ROUTER, 'differs')}) takes" in found.message
    assert "float32[2]" in found.message
    remedy = ROUTER.replace("        self.balance()  # inside\n", "").replace(
        "    loss.backward()\n", "    loss.backward()\n    net[1].balance()\n"
    )
    assert run(tmp_path, remedy, "remedy") == 0


def test_a_checkpoint_whose_state_no_operation_writes_to(tmp_path: Path) -> None:
    found = find(tmp_path, COUNTER, "recomputed-otherwise")
    assert "writes to" not in found.message
    assert "float32[2, 8]" in found.message
    assert "float32[3, 8]" in found.message
    assert "counters" in found.repair


@pytest.mark.parametrize(
    ("wrong", "right"), [("inference_mode", "no_grad"), ("head(features)", "head(features.clone())")]
)
def test_a_tensor_that_was_made_in_inference_mode(tmp_path: Path, wrong: str, right: str) -> None:
    found = find(tmp_path, INFERENCE, "inference-tensor")
    assert f"({place(INFERENCE, 'used')})" in found.message
    assert "no_grad" in found.repair
    assert "clone()" in found.repair
    assert run(tmp_path, INFERENCE.replace(wrong, right), "remedy") == 0


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("Parallel(Net())", "Parallel(Net(), find_unused_parameters=True)"),
        (".argmax(-1, keepdim=True)", ".softmax(-1).sum(-1, keepdim=True)"),
    ],
)
def test_parameters_that_ddp_waits_for_are_named_and_why(tmp_path: Path, wrong: str, right: str) -> None:
    found = find(tmp_path, DDP, "unused-in-ddp")
    assert "spare:weight and spare:bias" in found.message
    assert f"`argmax` has no derivative, so what comes after it has no graph ({place(DDP, 'cuts')})" in found.message
    assert "find_unused_parameters=True" in found.repair
    assert run(tmp_path, DDP.replace(wrong, right), "remedy") == 0


def test_none_of_a_program_that_fails_for_another_reason(tmp_path: Path) -> None:
    assert run(tmp_path, INFERENCE.replace("inference_mode", "no_grad") + "raise RuntimeError('another')\n") == 1
    found = {each.detector for each in explain(tmp_path / "run")}
    assert "failed" in found
    assert not found & {"recomputed-otherwise", "inference-tensor", "unused-in-ddp"}
