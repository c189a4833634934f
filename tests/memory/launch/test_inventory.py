"""``retrograd inventory`` on real scripts: what it writes, and that the script is left alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from retrograd.core.cli import main
from retrograd.memory.inventory.inventory import Inventory
from retrograd.memory.launch.requests import InventoryRequest
from tests.commands import SCRIPTS, run

MODES = """
import atexit
import torch

def tell():
    print("modes left:", torch._C._len_torch_function_stack())

torch.ones(1)
net = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    net(torch.ones(1, 3)).exp().sum().backward()
    optimizer.step()
tell()
"""


def take(folder: Path, *words: str) -> tuple[int, str, list[str]]:
    """Exit code, output, and lines of the errors."""
    code, output, errors = run([sys.executable, "-m", "retrograd", "inventory", "-o", "out", *words], folder)
    return code, output, errors.splitlines()


def load(folder: Path, rank: str = "rank00000") -> Inventory:
    assert (folder / "out" / rank / "inventory.html").read_text().startswith("<!doctype html>")
    return Inventory.load(folder / "out" / rank / "inventory.parquet")


def test_the_second_step_of_a_script(tmp_path: Path) -> None:
    script = str(SCRIPTS / "plain_loop.py")
    bare = run([sys.executable, script], tmp_path)
    code, output, errors = take(tmp_path, script)
    assert (code, output) == bare[:2]
    inventory = load(tmp_path)
    assert inventory.passes == 1
    rows = {(row["module"], row["slot"]): row for row in inventory.table.to_pylist()}
    assert rows["body.0", "mat1"]["kind"] == "input"
    assert rows["head", "mat2"]["name"] == "head:weight"
    assert Path(rows["head", "mat1"]["file"]).name == "toy.py"
    batch, hidden, classes = 8 * 4 * 4, 8 * 8 * 4, 8 * 2 * 4
    assert rows["body.0", "mat1"]["resident"] == batch
    assert rows["body.1", "result"]["resident"] == hidden
    targets, weight = 8 * 8, 4
    assert inventory.resident == batch + hidden + classes + targets + weight
    assert errors[0].startswith("retrograd: taking an inventory of ")
    assert errors[1].startswith("1 backward pass: 7 tensors saved besides")
    assert errors[2].split()[:2] == ["module", "tensors"]
    assert errors[-1] == (
        "retrograd: listed the saved tensors of backward pass 1; see it in a browser: out/rank*/inventory.html"
    )


@pytest.mark.parametrize("step", ["3"])
def test_another_step(tmp_path: Path, step: str) -> None:
    """The fourth is the last: nothing comes after it at which the inventory could be ended."""
    code, _, errors = take(tmp_path, "--pass", step, "--by", "tensor", "--timed", str(SCRIPTS / "plain_loop.py"))
    assert code == 0
    inventory = load(tmp_path)
    assert inventory.passes == 1
    assert len(inventory) == 8
    assert inventory.table["seconds"].null_count < 8
    assert errors[2].split()[0] == "tensor"


def test_a_step_that_is_never_made(tmp_path: Path) -> None:
    code, _, errors = take(tmp_path, "--pass", "9", str(SCRIPTS / "plain_loop.py"))
    assert code == 0
    assert errors[-1] == "retrograd: nothing was listed: 4 backward passes ran, and --pass 9 counts from 0"
    assert not (tmp_path / "out").exists()


def test_nothing_stays_when_the_step_is_over(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MODES)
    code, output, errors = take(tmp_path, "--timed", "script.py")
    assert (code, output) == (0, "modes left: 0\n"), errors


@pytest.mark.slow
def test_the_last_step_of_a_forked_child(tmp_path: Path) -> None:
    """Only the second child makes four steps, and ends as children of multiprocessing do: without ``atexit``."""
    code, _, errors = take(tmp_path, "--pass", "3", str(SCRIPTS / "forked.py"))
    assert code == 0, errors
    (file,) = (tmp_path / "out").glob("rank*/inventory.parquet")
    assert Inventory.load(file).passes == 1
    assert errors[-1] == "retrograd: listed in 1 process; see it in a browser: out/rank*/inventory.html"


@pytest.mark.slow
def test_a_script_that_fails_in_that_step(tmp_path: Path) -> None:
    code, _, errors = take(tmp_path, str(SCRIPTS / "fails_in_backward.py"), "raise")
    bare = run([sys.executable, str(SCRIPTS / "fails_in_backward.py"), "raise"], tmp_path)
    assert code == bare[0] != 0
    assert any("Error" in line for line in errors)


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    code, _, errors = take(tmp_path, "torchrun", "--standalone", "--nproc-per-node", "2", str(SCRIPTS / "ddp.py"))
    assert code == 0, errors
    assert len(load(tmp_path)) == len(load(tmp_path, "rank00001")) > 0


def test_what_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inventory", "--pass", "-1", str(SCRIPTS / "plain_loop.py")]) == 2
    assert "before the first" in capsys.readouterr().err
    assert main(["inventory", "nowhere.py"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_the_request_travels() -> None:
    request = InventoryRequest(path="/tmp/out", shown="out", number=3, by="tensor", timed=True)
    assert InventoryRequest.read({InventoryRequest.variable: request.write()}) == request
