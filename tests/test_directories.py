"""A relative path means the folder that it meant when it was given, wherever the program goes afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg

Go = Callable[[], None]


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Go:
    """The program changes its directory from one that has nothing in it to another, which must stay empty."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "before")
    return lambda: monkeypatch.chdir(tmp_path / "after")


@pytest.fixture(autouse=True)
def nothing_is_written_elsewhere(go: Go, tmp_path: Path) -> object:
    yield
    assert list((tmp_path / "after").iterdir()) == []


def train(net: nn.Module) -> None:
    net(torch.ones(2, 3)).sum().backward()


def test_a_recording(go: Go, tmp_path: Path) -> None:
    net = nn.Linear(3, 3)
    with rg.record(net, "run", tensors="self:output") as recording:
        for step in range(4):
            if step == 2:
                go()
            train(net)
            recording.flush()
    assert recording.path == tmp_path / "before" / "run"
    assert rg.write_report(rg.open_run(recording.path)) == tmp_path / "before" / "run" / "report.html"
    assert rg.open_run(tmp_path / "before" / "run").history["self:output"].tensors


def test_a_run_that_is_read_later(go: Go) -> None:
    net = nn.Linear(3, 3)
    with rg.record(net, "run", tensors="self:output"):
        train(net)
    run = rg.open_run("run")
    go()
    run.refresh()
    assert len(run.history["self:output"].rms) == 1
    assert run.history["self:output"].tensors[0].tensor.shape == (2, 3)
    assert rg.write_report(run).is_absolute()


def test_bundles_of_a_trace(go: Go, tmp_path: Path) -> None:
    with rg.trace(bundle="AddmmBackward0", folder="bundles") as trace:
        loss = nn.Linear(3, 3)(torch.ones(2, 3)).sum()
        go()
        loss.backward()
    assert trace.bundle("AddmmBackward0").parent == tmp_path / "before" / "bundles"
    assert rg.replay(trace.bundle("AddmmBackward0"))


def test_saved_tensors_on_the_disk(go: Go, tmp_path: Path) -> None:
    policy = rg.saved.Disk("./", min_bytes=0)
    go()
    net = nn.Linear(3, 3)
    with rg.keep_saved(net, policy):
        train(net)
    assert policy.folder == tmp_path / "before"


def test_features(go: Go, tmp_path: Path) -> None:
    class Restless(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            go()
            return torch.full((3,), float(index))

    net = nn.Linear(3, 3).eval()
    stored = rg.extract_dataset(net, torch.utils.data.DataLoader(Restless(), 2), "self", "features", progress=False)
    assert stored.folder == tmp_path / "before" / "features"
    assert stored["self"][:].shape == (4, 3)


def test_features_that_are_read_later(go: Go) -> None:
    net = nn.Linear(3, 3).eval()
    rg.extract_dataset(net, [torch.ones(2, 3)], "self", "features", progress=False)
    stored = rg.open_features("features")
    go()
    assert stored["self"][:].shape == (2, 3)


def test_the_ring_of_last_events(go: Go, tmp_path: Path) -> None:
    with rg.watch_hangs("run") as watch:
        go()
        train(nn.Linear(3, 3))
        assert watch.report() == tmp_path / "before" / "run" / "rank00000" / "hang-1.txt"
    assert (tmp_path / "before" / "run" / "rank00000" / "ring.bin").exists()
