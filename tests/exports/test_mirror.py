"""A mirror shows what the record says, while the run goes on, and training does not know of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
import wandb
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import retrograd as rg
from retrograd.errors import ExportError, PatternError, RetrogradWarning, StatisticError
from retrograd.exports import mirror as mirrors
from retrograd.exports import tensorboard as boards
from retrograd.runs import lookout
from retrograd.runs.rank_folder import RankFolder
from tests.drawing import draw, make_net, train
from tests.exports.offline import read_records, read_series


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout.Lookout.__init__, "__kwdefaults__", {"pause": 0.01})
    monkeypatch.setattr(lookout, "SHARE", 10.0)


def read_board(path: Path) -> dict[str, dict[int, float]]:
    board = EventAccumulator(str(path), {"scalars": 0}).Reload()
    return {tag: {event.step: event.value for event in board.Scalars(tag)} for tag in board.Tags()["scalars"]}


def check_series(found: Mapping[str, Mapping[int, float]], history: rg.History, home: str = "") -> None:
    """The loss, and the rms of all gradients of weights, are those of the record."""
    sites = history.select("*:weight.grad")
    assert len(sites) == 2
    expected = {"loss": history.loss} | {f"rms/{site}": history[site] for site in sites}
    assert {name.removeprefix(home) for name in found if "exponents" not in name} == set(expected)
    for name, series in expected.items():
        numbers = found[f"{home}{name}"]
        assert sorted(numbers) == series.steps.tolist()
        values = series.values if name == "loss" else series.rms
        np.testing.assert_allclose([numbers[step] for step in sorted(numbers)], values, rtol=1e-6)


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_all_is_there_at_the_end(tmp_path: Path, *, is_on_disk: bool) -> None:
    model = make_net()
    with rg.record(model, tmp_path / "run" if is_on_disk else None) as recording:
        mirror = rg.mirror(recording, "tensorboard", tmp_path / "board")
        train(model)
    check_series(read_board(tmp_path / "board"), recording.history)
    assert (mirror.steps, mirror.skipped) == (12, 0)
    assert "ended" in repr(mirror)


def test_losses_are_written_before_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look between the two tells nothing yet, or the series would lack these steps."""
    write_rows = RankFolder.write_rows

    def write_late(self: RankFolder, batches: Any) -> None:
        time.sleep(0.3)
        write_rows(self, batches)

    monkeypatch.setattr(RankFolder, "write_rows", write_late)
    model = make_net()
    with rg.record(model, tmp_path / "run") as recording:
        rg.mirror(recording, "tensorboard", tmp_path / "board")
        train(model)
    check_series(read_board(tmp_path / "board"), recording.history)


def test_steps_come_while_it_trains(tmp_path: Path) -> None:
    model = make_net()
    with rg.record(model) as recording:
        mirror = rg.mirror(recording, "tensorboard", tmp_path / "board")
        train(model)
        deadline = time.monotonic() + 60
        while mirror.steps < 9 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 9 <= mirror.steps < 12  # the last ones may still get late gradients


def test_training_is_bitwise_the_same(tmp_path: Path) -> None:
    model = make_net()
    plain = train(model, 30), [p.clone() for p in model.parameters()], torch.rand(1), random.random(), draw()
    model = make_net()
    with rg.record(model, tmp_path / "run") as recording:
        rg.mirror(recording, "tensorboard", tmp_path / "board", sites="*", statistics=["rms", "zero_share"])
        losses = train(model, 30, each=lambda: time.sleep(0.02))
    weights = list(model.parameters())
    drawn = torch.rand(1), random.random(), draw()
    assert losses == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, plain[1], strict=True))
    assert drawn == plain[2:]


def test_many_steps_are_thinned_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "MOST_STEPS", 5)
    model = make_net()
    with rg.record(model, tmp_path / "run") as recording:
        train(model, 40)
    mirror = rg.mirror(recording.path or "", "tensorboard", tmp_path / "board")  # a run that is over
    mirror.close()
    assert (mirror.steps, mirror.skipped) == (5, 35)
    assert sorted(read_board(tmp_path / "board")["loss"]) == [0, 9, 19, 29, 39]


def test_findings_are_told_once(tmp_path: Path) -> None:
    model = make_net()
    with rg.record(model) as recording:
        rg.mirror(recording, "tensorboard", tmp_path / "board", histograms=False)
        (model(torch.randn(3, 4)).mean() * float("nan")).backward()
        train(model, 6, each=lambda: time.sleep(0.05))
    board = EventAccumulator(str(tmp_path / "board"), {"tensors": 0}).Reload()
    found = rg.explain(recording)
    assert found
    for finding in found:
        texts = [
            event.tensor_proto.string_val[0].decode()
            for event in board.Tensors(f"findings/{finding.detector}/text_summary")
        ]
        assert sum(finding.severity in text for text in texts) == sum(
            each.detector == finding.detector for each in found
        )


def test_a_tracker_that_fails_is_told_once_and_gets_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, failing = boards.EventFiles.add_numbers, threading.Event()
    failed = threading.Event()

    def fail(self: Any, step: int, numbers: Mapping[str, float]) -> None:
        if failing.is_set():
            failed.set()
            raise ConnectionError("the server is away")
        add(self, step, numbers)

    monkeypatch.setattr(boards.EventFiles, "add_numbers", fail)
    failing.set()
    model = make_net()
    with pytest.warns(RetrogradWarning, match="the server is away") as told:
        recording = rg.record(model)
        rg.mirror(recording, "tensorboard", tmp_path / "board")
        train(model)
        assert failed.wait(60)
        failing.clear()
        recording.close()
    assert len(told) == 1
    check_series(read_board(tmp_path / "board"), recording.history)


def test_a_writer_of_the_program_is_left_open(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path / "board"))
    model = make_net()
    with rg.record(model) as recording:
        rg.mirror(recording, writer)
        train(model)
    writer.add_scalar("mine", 1.0, 99)
    writer.close()
    found = read_board(tmp_path / "board")
    assert found.pop("mine") == {99: 1.0}
    check_series(found, recording.history, "retrograd/")


def test_wandb_beside_and_within_the_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(console="off", x_disable_stats=True)
    mine = wandb.init(project="mine", dir=str(tmp_path / "mine"), settings=settings)
    try:
        model = make_net()
        with rg.record(model) as recording:
            rg.mirror(recording, mine)
            rg.mirror(recording, "wandb", tmp_path / "ours")
            train(model, each=lambda: mine.log({"accuracy": 0.5}))
        mine.log({"accuracy": 1.0})  # it goes on
        mine.finish()
        series = read_series_of(tmp_path / "mine")
        assert len(series.pop("accuracy")) == 13
        check_series(series, recording.history, "retrograd/")
        check_series(read_series_of(tmp_path / "ours"), recording.history)
    finally:
        wandb.teardown()


def read_series_of(folder: Path) -> dict[str, dict[int, float]]:
    """What was logged, under our steps where there are some, else those of the library."""
    records = read_records(folder)
    for record in records:
        if record.WhichOneof("record_type") == "history":
            names = {"/".join(item.nested_key) or item.key: item for item in record.history.item}
            step = names.get("step") or names.get("retrograd/step") or names["_step"]
            record.history.item.add(key="step", value_json=step.value_json)
    found = read_series(records)
    return {name: values for name, values in found.items() if not name.startswith("_") and not name.endswith("step")}


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow's own
def test_mlflow_within_the_programs_run(tmp_path: Path) -> None:
    address = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mine.db'}")
    try:
        model = make_net()
        with mlflow.start_run() as mine:
            with rg.record(model) as recording:
                rg.mirror(recording, mine)
                train(model)
            assert mlflow.active_run() is not None
            mlflow.log_metric("mine", 1.0)
        client = MlflowClient()
        metrics = client.get_run(mine.info.run_id).data.metrics
        assert metrics.pop("mine") == 1.0
        check_series(
            {name: {m.step: m.value for m in client.get_metric_history(mine.info.run_id, name)} for name in metrics},
            recording.history,
            "retrograd/",
        )
    finally:
        mlflow.set_tracking_uri(address)


def test_what_cannot_be_mirrored() -> None:
    with rg.record(make_net()) as recording:
        with pytest.raises(ExportError, match="'tensorboard', 'wandb', 'mlflow'"):
            rg.mirror(recording, "comet")
        with pytest.raises(ExportError, match="object of type list"):
            rg.mirror(recording, [])
        with pytest.raises(ExportError, match="in memory has no folder"):
            rg.mirror(recording, "tensorboard")
        with pytest.raises(StatisticError, match="rsm"):
            rg.mirror(recording, "tensorboard", statistics=["rsm"])
        with pytest.raises(PatternError):
            rg.mirror(recording, "tensorboard", sites="")


def test_a_pattern_that_matches_nothing_is_told(tmp_path: Path) -> None:
    model = make_net()
    with (
        pytest.warns(RetrogradWarning, match=r"'0:wieght.grad' matches no site.*\n.*0:weight.grad"),
        rg.record(model) as recording,
    ):
        rg.mirror(recording, "tensorboard", tmp_path / "board", sites="0:wieght.grad")
        train(model)
    assert set(read_board(tmp_path / "board")) == {"loss"}


def test_an_export_of_some_series(tmp_path: Path) -> None:
    model = make_net()
    with rg.record(model, tmp_path / "run"):
        train(model)
    path = rg.export(tmp_path / "run", "tensorboard", tmp_path / "board", sites="*:weight.grad", statistics=["rms"])
    check_series(read_board(path), rg.open_run(tmp_path / "run").history)
    with pytest.raises(ExportError, match="not chosen for 'csv'"):
        rg.export(tmp_path / "run", "csv", sites="*")
