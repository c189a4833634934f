"""Files that appear whole or not at all, whatever happens to the process or to the disk while they are written."""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Self

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core import files
from retrograd.core.errors import RunWriteError
from retrograd.core.exports.tables import export_csv
from retrograd.core.history.history import History
from retrograd.following.graph.graph import Graph
from retrograd.following.launch.requests import TraceRequest
from retrograd.following.tracing.trace import Trace
from retrograd.memory.inventory.inventory import Inventory
from tests.core.runs.written import write_run
from tests.processes import wait_for_child


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What there is to be written, of one pass."""
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with rg.trace() as trace, rg.take_inventory(net) as inventory:
        loss = net(torch.ones(2, 3)).sum()
        graph = rg.walk(loss)
        loss.backward()
    run = rg.open_run(write_run(tmp_path_factory.mktemp("run")))
    return {"trace": trace, "inventory": inventory, "graph": graph.detach(), "run": run}


Write = Callable[[dict[str, Any], Path], object]

WRITERS: dict[str, Write] = {
    "report.html": lambda seen, path: rg.write_report(seen["run"], path),
    "inventory.html": lambda seen, path: rg.write_inventory(seen["inventory"], path),
    "inventory.parquet": lambda seen, path: seen["inventory"].save(path),
    "trace.json.gz": lambda seen, path: seen["trace"].save(path),
    "chrome.json": lambda seen, path: rg.write_chrome_trace(seen["trace"], path),
    "graph.parquet": lambda seen, path: seen["graph"].save(path),
    "graph.svg": lambda seen, path: rg.draw_graph(seen["graph"], path),
    "graph.html": lambda seen, path: rg.draw_graph(seen["graph"], path),
    "statistics.csv": lambda seen, path: export_csv(seen["run"], path),
}
EACH = pytest.mark.parametrize("name", WRITERS)


class Deadly:
    """A file in the middle of whose first content the process is killed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        self._file.write(bytes(data)[: len(data) // 2])
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def die_while(write: Callable[[], object]) -> int:
    """The exit code of a child that writes so."""
    create = files.create
    child = os.fork()
    if not child:
        try:
            files.create = lambda path: Deadly(create(path))  # type: ignore[assignment, return-value]
            write()
        finally:
            os._exit(0)
    return wait_for_child(child)


@EACH
def test_a_process_that_is_killed_leaves_what_was_there(name: str, seen: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"what was there")
    assert die_while(lambda: WRITERS[name](seen, path)) == -signal.SIGKILL
    assert path.read_bytes() == b"what was there"
    [left] = [each for each in tmp_path.iterdir() if each != path]
    WRITERS[name](seen, path)
    assert left.exists()  # it may be that somebody still writes it
    os.utime(left, (time.time() - 7200,) * 2)
    WRITERS[name](seen, path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() != b"what was there"


@EACH
def test_a_disk_that_is_full_leaves_what_was_there(
    name: str, seen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(b"what was there")
    create = files.create

    class Full(Deadly):
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "create", lambda path: Full(create(path)))
    with pytest.raises((rg.RetrogradError, OSError), match="No space left"):
        WRITERS[name](seen, path)
    assert path.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [path]


@EACH
def test_nothing_is_written_through_a_name_that_could_be_foreseen(
    name: str, seen: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / f".tmp-{name}").symlink_to("precious")
    WRITERS[name](seen, tmp_path / name)
    assert (tmp_path / "precious").read_bytes() == b"mine"


def test_files_can_be_read_again(seen: dict[str, Any], tmp_path: Path) -> None:
    assert len(Trace.load(seen["trace"].save(tmp_path / "trace")).events) == len(seen["trace"].events)
    assert len(Inventory.load(seen["inventory"].save(tmp_path / "inventory"))) == len(seen["inventory"])
    assert len(Graph.load(seen["graph"].save(tmp_path / "graph"))) == len(seen["graph"])


def test_a_link_of_the_user_is_followed(tmp_path: Path) -> None:
    (tmp_path / "latest.html").symlink_to("today.html")
    files.write_text(tmp_path / "latest.html", "words")
    assert (tmp_path / "latest.html").is_symlink()
    assert (tmp_path / "today.html").read_text() == "words"


def test_permissions_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    files.write_text(path, "one")
    usual = path.stat().st_mode
    (tmp_path / "plain").write_text("")
    assert usual == (tmp_path / "plain").stat().st_mode
    path.chmod(0o640)
    files.write_text(path, "two")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_text() == "two"


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    files.write_text(pipe, "words")
    reader.join(30)
    assert found == ["words"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_others_have_written_is_let_be(tmp_path: Path) -> None:
    names = [".tmp-page.html", ".tmp-0123456789ab-other.html", ".tmp-0123456789AB-page.html", "0123456789ab-page.html"]
    for name in names:
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (0, 0))
    files.write_text(tmp_path / "page.html", "words")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "page.html"])


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_bundle_of_a_killed_process_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".tmp-0123456789ab-node"
    left.mkdir()
    (left / "tensors.safetensors").write_bytes(b"half")
    fresh = tmp_path / ".tmp-ba9876543210-node"
    fresh.mkdir()
    for path in (left / "tensors.safetensors", left):
        os.utime(path, (time.time() - 7200,) * 2)
    node = Double.apply(torch.ones(2, requires_grad=True)).grad_fn
    rg.write_bundle(node, [torch.ones(2)], tmp_path / "node")
    assert sorted(path.name for path in tmp_path.iterdir()) == [fresh.name, "node"]


def test_half_of_a_surrogate_pair_stands_in_every_file(tmp_path: Path) -> None:
    net = nn.Sequential()
    net.add_module("l\udc80r", nn.Linear(3, 3))
    with rg.trace() as trace, rg.take_inventory(net) as inventory:
        loss = net(torch.ones(2, 3)).sum()
        graph = rg.walk(loss)
        loss.backward()
    history = History()
    with rg.record(net) as recording:
        net(torch.ones(2, 3)).sum().backward()
    history = recording.history
    found = {"trace": trace, "inventory": inventory, "graph": graph, "run": history}
    for name in WRITERS.keys() - {"statistics.csv"}:
        WRITERS[name](found, tmp_path / name)
    assert {event.module for event in Trace.load(tmp_path / "trace.json.gz").events} >= {"l\udc80r"}
    assert {node.module for node in Graph.load(tmp_path / "graph.parquet")} >= {"l\\udc80r"}


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://bucket/run", "memory://run", "file:///runs/a"])
def test_an_address_is_not_taken_for_a_folder(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (
        lambda: TraceRequest(command=("python", "train.py"), shown=address).choose_folder(),
        lambda: rg.trace(folder=address),
        lambda: rg.watch_hangs(address).__enter__(),
        lambda: rg.saved.Disk(address),
        lambda: rg.extract_dataset(nn.Linear(2, 2), [torch.ones(1, 2)], "self:output", folder=address),
    ):
        with pytest.raises(RunWriteError, match="is an address"):
            use()
    assert not list(tmp_path.iterdir())
