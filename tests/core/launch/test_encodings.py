"""Whatever a stream can encode, each command ends as it does where all of Unicode can be printed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.cli.commands import COMMANDS
from tests import warm

ENCODINGS = ["ascii", "cp1252", "cp932"]

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"größe→µ世": nn.Linear(4, 4), "b": nn.Linear(4, 1)})
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.inner["b"](torch.relu(self.inner["größe→µ世"](x))) * (self.scale - 1).log()

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    loss = net(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder: Path, encoding: str, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[bytes]:
    environment = dict(os.environ) | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "retrograd", *words]
    return warm.run(
        command, cwd=folder, env=environment, capture_output=True, timeout=240, input=stdin and stdin.encode()
    )


def recorded(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = recorded(tmp_path_factory.mktemp("é→世"))
    for name in ("a", "b"):
        assert run(folder, "utf-8", "run", "-o", f"runs/{name}", "train.py").returncode == 0
    return folder


READS = [
    ["explain", "runs/a"],
    ["explain", "runs/a", "--all", "-v", "--not-checked"],
    ["explain", "runs/a", "--json"],
    ["report", "runs/a"],
    ["view", "runs/a"],
    ["view", "runs/a", "--map"],
    ["view", "runs/a", "--sites", "nowhere→*"],
    ["ls", "runs"],
    ["ls", "runs", "--json"],
    ["compare", "runs/a", "runs/b"],
    ["compare", "runs/a", "runs/b", "--json"],
    ["export", "runs/a", "--to", "csv", "-o", "größe→.csv"],
    ["compact", "runs/a"],
    ["compact", "runs/→"],
    ["hangs", "→"],
    ["replay", "→"],
    ["completion", "bash"],
    ["--version"],
    ["--help"],
]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("words", READS, ids=" ".join)
def test_what_reads_a_run_prints_in_any_encoding(
    folder: Path, words: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    told = [printed(words, each, monkeypatch) for each in ("utf-8", encoding)]
    assert told[1][0] == told[0][0]
    if "--json" in words:
        assert json_lines(told[1][1]) == json_lines(told[0][1])
        assert told[0][1].strip()


def printed(words: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The exit code of a command, and what it has printed on a stdout that refuses what it cannot encode."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    errors = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", errors)
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        stream.flush()
    return code, stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def json_lines(text: str) -> list[object]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.name)
def test_help_is_printed_in_any_encoding(kind: type, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = printed([kind.name, "--help"], encoding, monkeypatch)  # type: ignore[attr-defined]
    assert code == 0
    assert text.startswith("usage: ")


RUNS = [
    ["run", "-o", "runs/x", "train.py"],
    ["explain", "-o", "runs/x", "train.py"],
    ["trace", "--live", "-o", "runs/x", "train.py"],
    ["inventory", "-o", "runs/x", "train.py"],
    ["debug", "--break", "inner.größe→µ世:*", "train.py"],
]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("words", RUNS, ids=lambda words: words[0])
def test_what_runs_a_program_prints_in_any_encoding(tmp_path: Path, words: list[str], encoding: str) -> None:
    recorded(tmp_path)
    stdin = "where\nup\nsaved\nhelp\ncontinue\nquit\n" if words[0] == "debug" else None
    wanted = run(recorded(tmp_path / "wanted"), "utf-8", *words, stdin=stdin)
    done = run(tmp_path, encoding, *words, stdin=stdin)
    said = done.stdout.decode(encoding) + done.stderr.decode(encoding)
    assert done.returncode == wanted.returncode, said
    assert "UnicodeEncodeError" not in said
    if words[0] in ("explain", "run"):
        assert "critical" in said


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_prints_to_a_file_prints_in_its_encoding(folder: Path, tmp_path: Path, encoding: str) -> None:
    run = rg.open_run(folder / "runs/a")
    with (tmp_path / "out.txt").open("w", encoding=encoding) as file:
        rg.print_table(run, file=file)
        rg.print_heatmap(run, file=file)
    assert "inner.gr" in (tmp_path / "out.txt").read_text(encoding=encoding)
