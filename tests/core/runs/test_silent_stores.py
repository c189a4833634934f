"""Stores that take up a connection and never answer, that cannot be found, and that are slow."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.errors import RunUnreachableError
from retrograd.core.limits import LIMITS
from tests.core.runs.written import write_run

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("upath")
memory = pytest.importorskip("fsspec.implementations.memory")

SHORT = 0.4
METHODS = ("cat_file", "find", "ls", "info")


class Gate:
    """What requests to the store in memory wait for.

    Attributes:
        is_silent: whether a request of this method, for this name, is not answered.
        pause: seconds that it takes to get a part of the statistics.
    """

    def __init__(self) -> None:
        self.is_silent: Callable[[str, str], bool] = lambda method, name: False
        self.pause = 0.0
        self.end = threading.Event()

    def pass_through(self, method: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def ask(store: Any, path: str, *args: Any, **named: Any) -> Any:
            if self.is_silent(method, path):
                self.end.wait(60)
                raise ConnectionError("the test is over")
            time.sleep(self.pause if "statistics/part" in path and named.get("end") != 1 else 0.0)
            return plain(store, path, *args, **named)

        return ask


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local folders of runs at addresses lie below the current directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The gate of a store that holds a run of three steps at ``memory://runs/a``."""
    store = fsspec.filesystem("memory")
    write_run("memory://runs/a")  # type: ignore[arg-type]
    monkeypatch.setattr(LIMITS, "silence_seconds", SHORT)
    gate = Gate()
    for method in METHODS:
        plain = getattr(memory.MemoryFileSystem, method)
        monkeypatch.setattr(memory.MemoryFileSystem, method, gate.pass_through(method, plain))
    yield gate
    gate.end.set()
    join_askers()
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def join_askers() -> None:
    """Wait for the threads that were left to themselves."""
    for thread in threading.enumerate():
        if thread.name == "retrograd-store":
            thread.join(100)


def test_a_run_in_a_store_that_falls_silent(gate: Gate) -> None:
    gate.is_silent = lambda method, name: True
    with pytest.raises(RunUnreachableError, match=r"'memory://runs/a'.*not answered for 0\.4 seconds"):
        rg.open_run("memory://runs/a")


@pytest.mark.parametrize("file", ["manifest.json", "rank.json", "statistics/part", "events/part"])
def test_a_store_that_falls_silent_while_a_run_is_opened(gate: Gate, file: str) -> None:
    gate.is_silent = lambda method, name: method == "cat_file" and file in name
    with pytest.raises(RunUnreachableError, match=rf"{file}.*not answered"):
        rg.open_run("memory://runs/a")


def test_a_refresh_that_was_given_up_has_changed_nothing(gate: Gate) -> None:
    opened = rg.open_run("memory://runs/a")
    before = repr(opened)
    gate.is_silent = lambda method, name: True
    with pytest.raises(RunUnreachableError):
        opened.refresh()
    assert repr(opened) == before
    assert opened.history["a:output"].steps.tolist() == [0, 1, 2]
    gate.is_silent = lambda method, name: False
    opened.refresh()
    assert opened.status == "finished"


def test_a_tensor_in_a_store_that_falls_silent(gate: Gate) -> None:
    kept = rg.open_run("memory://runs/a").history["a:output"].tensors[0]
    gate.is_silent = lambda method, name: "shard" in name
    with pytest.raises(RunUnreachableError):
        kept.load()
    gate.is_silent = lambda method, name: False
    assert kept.load().tolist() == [0.0, 0.0]  # type: ignore[union-attr]


def test_a_slow_store_is_waited_for(gate: Gate) -> None:
    gate.pause = 2 * SHORT
    assert rg.open_run("memory://runs/a").history["a:output"].steps.tolist() == [0, 1, 2]


@pytest.mark.parametrize("words", [["report"], ["compare", "memory://runs/a"], ["view"], ["explain"]])
def test_commands_tell_of_a_store_that_falls_silent(
    gate: Gate, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    gate.is_silent = lambda method, name: True
    assert main([*words, "memory://runs/a"]) != 0
    told = capsys.readouterr().err
    assert "run-unreachable" in told
    assert "has not answered" in told


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A client that tries once, and knows no server of other tests, nor they this one."""
    s3fs = pytest.importorskip("s3fs")
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def silent(s3: None) -> Iterator[str]:
    """The address of a server that takes up connections, and never answers."""
    taken: list[socket.socket] = []
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(server.accept()[0])

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}"
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    acceptor.join(60)
    for each in taken:
        each.close()
    join_askers()
    assert taken


def test_a_server_that_never_answers(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "silence_seconds", 2.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", silent)
    with pytest.raises(RunUnreachableError, match=r"'s3://bucket/runs/silent'.*not answered"):
        rg.open_run("s3://bucket/runs/silent")


def test_a_server_that_nobody_knows(s3: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://nowhere.invalid:1")
    with pytest.raises(RunUnreachableError, match=r"nowhere\.invalid"):
        rg.open_run("s3://bucket/runs/nowhere")


def test_a_server_that_refuses(s3: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with pytest.raises(RunUnreachableError, match=f"127.0.0.1:{port}"):
        rg.open_run("s3://bucket/runs/refused")
