"""A model may be copied and saved while it is recorded; the copy is a plain model."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from tests.recording.collector import collect

SITES = ["*:output*", "*:input*", "*:weight*"]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def test_a_deep_copy_is_not_recorded() -> None:
    net = make_net()
    with collect(net, sites=SITES) as seen:
        net(torch.ones(2, 3)).sum().backward()
        twin = copy.deepcopy(net)
        rows = len(seen.rows)
        twin(torch.ones(2, 3)).sum().backward()
        assert len(seen.rows) == rows
        net(torch.ones(2, 3)).sum().backward()
    assert [row.micro for row in seen.all("0:output")] == [0, 1]
    assert [row.calls for row in seen.all("0:weight.grad")] == [1, 1]
    assert torch.equal(twin[0].weight.grad, net[0].weight.grad / 2)  # type: ignore[arg-type, operator]


def test_a_copy_can_be_recorded_by_itself() -> None:
    net = make_net()
    with collect(net):
        twin = copy.deepcopy(net)
    with collect(twin) as seen:
        twin(torch.ones(2, 3)).sum().backward()
    assert seen.one("0:output.grad").calls == 1


def test_a_saved_model_loads_where_there_is_no_retrograd(tmp_path: Path) -> None:
    net = make_net()
    with collect(net, sites=SITES):
        net(torch.ones(2, 3)).sum().backward()
        torch.save(net, tmp_path / "net.pt")
        torch.save(net.state_dict(), tmp_path / "weights.pt")
        (tmp_path / "net.pickle").write_bytes(pickle.dumps(net))
    script = f"""
import pickle, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "retrograd":
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import torch
net = torch.load({str(tmp_path / "net.pt")!r}, weights_only=False)
torch.load({str(tmp_path / "weights.pt")!r}, weights_only=True)
other = pickle.load(open({str(tmp_path / "net.pickle")!r}, "rb"))
for each in (net, other):
    each(torch.ones(2, 3)).sum().backward()
assert "retrograd" not in sys.modules
print("loaded", len(net[0]._forward_hooks))
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert result.stdout.startswith("loaded"), result.stderr


def test_watched_tensors_and_losses_can_be_saved(tmp_path: Path) -> None:
    net = make_net()
    with collect(net):
        x = torch.ones(2, 3, requires_grad=True)
        out = net(x)
        torch.save({"x": x, "out": out}, tmp_path / "batch.pt")
        out.sum().backward()
    assert set(torch.load(tmp_path / "batch.pt", weights_only=True)) == {"x", "out"}
