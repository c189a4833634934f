"""When the room for compiled code is loaded: whatever is compiled, and in which order, what runs in it is recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import retrograd as rg
from tests import warm

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)

def train(call):
    for _ in range(2):
        optimizer.zero_grad()
        call(x).square().sum().backward()
        optimizer.step()

x = torch.arange(6.0).reshape(2, 3)
"""

PROGRAM = """
import json, os, sys
import retrograd as rg
rg.record  # loaded once for all of them
{model}
def is_loaded():
    return any(name.startswith("retrograd.compiled") for name in sys.modules)

for name, body in json.load(sys.stdin).items():
    if os.fork():
        os.wait()
        import torch._dynamo, torch._inductor.pattern_matcher  # all after the first one find them loaded
        continue
    if name != "loaded late":
        net, optimizer = make()
    exec(body)
    found = {{str(site): recording.history[site].rms.tolist() for site in recording.history.sites}}
    print(json.dumps([name, is_loaded(), found]), flush=True)
    os._exit(0)
"""

ORDERS = {
    "loaded late": """
assert "torch._dynamo" not in sys.modules
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
with rg.record(net) as recording:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(torch.compile(net, backend="aot_eager"))
""",
    "eager": """
with rg.record(net) as recording:
    train(net)
""",
    "before": """
call = torch.compile(net, backend="aot_eager")
with rg.record(net) as recording:
    train(call)
""",
    "wrapper": """
call = torch.compile(net, backend="aot_eager")
with rg.record(call) as recording:
    train(call)
""",
    "after": """
with rg.record(net) as recording:
    call = torch.compile(net, backend="aot_eager")
    train(call)
""",
    "after an eager step": """
with rg.record(net) as recording:
    net(x).square().sum().backward()
    optimizer.step()
    assert not is_loaded()
net, optimizer = make()
with rg.record(net) as recording:
    train(torch.compile(net, backend="aot_eager"))
""",
    "in place": """
with rg.record(net) as recording:
    net.compile(backend="aot_eager")
    train(net)
""",
    "in place before": """
net.compile(backend="aot_eager")
with rg.record(net) as recording:
    train(net)
""",
    "function": """
with rg.record(net) as recording:
    train(torch.compile(lambda x: net(x), backend="aot_eager"))
""",
    "something else before": """
torch.compile(lambda x: x.sin(), backend="aot_eager")(x)
with rg.record(net) as recording:
    train(torch.compile(net, backend="aot_eager"))
""",
    "a part": """
with rg.record(net) as recording:
    net[0] = torch.compile(net[0], backend="aot_eager")
    train(net)
""",
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bool, dict[str, list[float]]]]:
    """Of each order whether the room was loaded, and what was recorded."""
    script = tmp_path_factory.mktemp("orders") / "train.py"
    script.write_text(PROGRAM.format(model=MODEL))
    words = [sys.executable, str(script)]
    done = subprocess.run(words, input=json.dumps(ORDERS), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return {name: (is_loaded, found) for name, is_loaded, found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_compiled_code_is_recorded_whenever_it_is_compiled(
    order: str, recorded: dict[str, tuple[bool, dict[str, list[float]]]]
) -> None:
    is_loaded, found = recorded[order]
    assert is_loaded == (order != "eager")
    _, eager = recorded["eager"]
    assert found.keys() == eager.keys()
    for site, rms in eager.items():
        np.testing.assert_allclose(found[site], rms, rtol=1e-5, err_msg=site)


@pytest.mark.slow
def test_under_the_command_too(recorded: dict[str, tuple[bool, dict[str, list[float]]]], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MODEL + "net, optimizer = make()\nnet.compile(backend='aot_eager')\ntrain(net)\n")
    words = [sys.executable, "-m", "retrograd", "run", "-o", str(tmp_path / "run"), str(script)]
    done = warm.run(words, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "run").glob("rank*")
    history = rg.open_run(path).history
    for site, rms in recorded["eager"][1].items():
        np.testing.assert_allclose(history[site].rms, rms, rtol=1e-5, err_msg=site)
