"""Runs in a real S3 server on this machine: other processes, kills, ranks, and a server that goes away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.errors import RetrogradWarning, RunUnreachableError, RunWriteError
from retrograd.core.limits import LIMITS
from tests import warm
from tests.core.history.made import make_steps
from tests.core.runs.test_silent_stores import join_askers
from tests.core.runs.written import open_writer

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytest.importorskip("upath")
pytestmark = pytest.mark.slow

SCRIPT = """
import sys, torch
import retrograd as rg

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recording = rg.record(model, sys.argv[1], resume=sys.argv[2] == "resume", tensors="0:output")
for step in range(recording.step, int(sys.argv[3])):
    model(torch.full((4, 2), step + 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
recording.flush()  # and nobody closes it
if sys.argv[2] == "wait":
    print("flushed", flush=True)
    sys.stdin.read()
"""


class Server:
    """A server that can be stopped, and started again without what it held."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"  # a name: it has to be resolved, also at the end of a program

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            time.sleep(0.1)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")

    def halt(self) -> None:
        """Let it take up connections, and answer none."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local folders of runs at addresses lie below the current directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        served = Server()
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "not-in-any-file")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", served.url)
        patch.setenv("OMP_NUM_THREADS", "1")
        served.start()
        yield served
        served.stop()


@pytest.fixture
def run(server: Server, request: pytest.FixtureRequest) -> str:
    return f"s3://bucket/runs/{request.node.name}"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def start(script: Path, *words: str, rank: int = 0) -> subprocess.Popen[str]:
    return warm.Popen(
        [sys.executable, str(script), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RANK": str(rank)},
    )


def finish(process: subprocess.Popen[str]) -> int:
    """Let a process end, and return its exit code."""
    process.communicate("", timeout=200)
    return process.returncode


def test_a_process_that_is_killed_while_another_reads_and_a_third_resumes(script: Path, run: str) -> None:
    writer = start(script, run, "wait", "3")
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "flushed\n"
        opened = rg.open_run(run)
        assert opened.status == "running"
        assert opened.history["0:output"].steps.tolist() == [0, 1, 2]
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate(timeout=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LIMITS, "stale_seconds", 0.0)  # two minutes later
        opened.refresh()
        assert opened.status == "stopped"
    assert finish(start(script, run, "resume", "5")) == 0
    opened.refresh()
    assert opened.status == "finished"
    assert opened.history["0:output"].steps.tolist() == [0, 1, 2, 3, 4]
    shapes = [tuple(kept.load().shape) for kept in opened.history["0:output"].tensors]  # type: ignore[union-attr]
    assert shapes == [(4, 3)] * 5
    for name in s3fs.S3FileSystem().find(run.removeprefix("s3://")):
        assert b"not-in-any-file" not in s3fs.S3FileSystem().cat_file(name)


def test_numbers_are_those_of_a_local_folder(script: Path, run: str, tmp_path: Path) -> None:
    assert finish(start(script, run, "new", "3")) == 0
    assert finish(start(script, str(tmp_path / "run"), "new", "3")) == 0
    here, there = rg.open_run(tmp_path / "run").history, rg.open_run(run).history
    assert here.site_names == there.site_names
    for site in here.site_names:
        assert here[site].rms.tobytes() == there[site].rms.tobytes()
        assert here[site].steps.tolist() == there[site].steps.tolist()


def test_ranks_write_one_run(script: Path, run: str) -> None:
    ranks = [start(script, run, "wait", "2", rank=rank) for rank in range(2)]
    for each in ranks:
        assert each.stdout is not None
        assert each.stdout.readline() == "flushed\n"
    for each in ranks:
        assert finish(each) == 0
    opened = rg.open_run(run)
    assert [(rank.rank, rank.status, rank.is_extra) for rank in opened.ranks] == [
        (0, "finished", False),
        (1, "finished", False),
    ]
    assert opened.history["0:output"].steps.tolist() == [0, 1]
    assert opened.history["0:output"].statistic("count").tolist() == [24, 24]  # of both


def test_opening_asks_once_for_each_file(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        writer = open_writer(run, join=True)
        for batch in make_steps(range(5)):
            writer.add_rows(batch)
            writer.flush()
        writer.close()
    asked: list[str] = []
    plain = s3fs.S3FileSystem._call_s3

    async def note(self: Any, method: str, *words: Any, **named: Any) -> Any:
        asked.append(method)
        return await plain(self, method, *words, **named)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", note)
    files = len(s3fs.S3FileSystem(skip_instance_cache=True).find(run.removeprefix("s3://")))
    asked.clear()
    opened = rg.open_run(run)
    assert len(asked) <= files + 1  # and one list of them
    asked.clear()
    opened.refresh()
    assert len(asked) <= 6  # the list, the manifest, and of each rank a file, and a folder of tensors that is not there
    asked.clear()
    assert len(opened.history["a:output"]) == 5
    assert not asked
    monkeypatch.setenv("RANK", "0")
    writer = open_writer(str(opened.path), resume=True)
    writer.add_rows(make_steps([5])[0])
    writer.close()
    opened.refresh()
    assert len(opened.history["a:output"]) == 6


def test_an_unmodified_script(script: Path, run: str) -> None:
    plain = script.with_name("plain.py")
    plain.write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\nmodel(torch.ones(1, 2)).sum().backward()\n"
        "torch.optim.SGD(model.parameters(), lr=0.1).step()\n"
    )
    words = [sys.executable, "-m", "retrograd", "run", "-o", run, str(plain)]
    told = warm.run(words, capture_output=True, text=True, timeout=250, check=True)
    assert "recorded 1 step" in told.stderr
    assert rg.open_run(run).status == "finished"


def test_a_bucket_that_is_not_there_is_one_error(server: Server) -> None:
    with pytest.raises(RunWriteError, match=r"cannot be written.*bucket.*\n.*whether its bucket is there") as caught:
        rg.record(nn.Linear(2, 2), "s3://no-bucket-of-this-name/run")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__, "what the client of the store went through is not shown"


def test_a_store_that_hangs_while_a_run_is_read(server: Server, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = open_writer(run)
    writer.add_rows(make_steps([0])[0])
    writer.close()
    opened = rg.open_run(run)
    monkeypatch.setattr(LIMITS, "silence_seconds", 2.0)
    server.halt()
    try:
        with pytest.raises(RunUnreachableError, match="not answered"):
            opened.refresh()
        assert main(["report", run]) == 2
        assert opened.history["a:output"].steps.tolist() == [0]
    finally:
        server.go_on()
        join_askers()
    opened.refresh()
    assert opened.status == "finished"


def test_training_goes_on_while_the_store_is_away(server: Server, run: str) -> None:
    model = nn.Linear(2, 1)
    recording = rg.record(model, run)
    sink: Any = recording._sink
    server.stop()
    try:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        with pytest.warns(RetrogradWarning, match="Training goes on"):
            recording.flush()
        with pytest.raises(RunUnreachableError):
            rg.open_run(run)
        with pytest.raises(RunWriteError):
            rg.record(nn.Linear(1, 1), run + "-other")
        assert rg.open_run(sink.folder).history.rows.count > 0
    finally:
        server.start()
    recording.close()
    assert not sink.lost
    assert rg.open_run(run).history.rows.count > 0
