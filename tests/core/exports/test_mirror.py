"""A mirror shows what the record says, while the run goes on, and training does not know of it."""

from __future__ import annotations

import json
import multiprocessing
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
from retrograd.core.errors import ExportError, PatternError, RetrogradWarning, StatisticError
from retrograd.core.exports import mirror as mirrors
from retrograd.core.exports import tensorboard as boards
from retrograd.core.history.sink import Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs.rank_folder import RankFolder
from retrograd.core.sites.selection import Selection
from tests.core.exports.offline import read_records, read_series
from tests.core.history.made import SITES, make_batch
from tests.drawing import draw, make_net, train


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "flush_seconds", 0.01)
    monkeypatch.setattr(LIMITS, "look_share", 10.0)


def read_board(path: Path) -> dict[str, dict[int, float]]:
    board = EventAccumulator(str(path), {"scalars": 0}).Reload()
    return {tag: {event.step: event.value for event in board.Scalars(tag)} for tag in board.Tags()["scalars"]}


def check_series(found: Mapping[str, Mapping[int, float]], history: rg.History, home: str = "") -> None:
    """The loss, and the rms of all gradients of weights, are those of the record."""
    sites = history.select("*:weight.grad")
    assert len(sites) == 2
    expected: dict[str, Any] = dict(history.scalars) | {f"rms/{site}": history[site] for site in sites}
    assert {name.removeprefix(home) for name in found if "exponents" not in name} == set(expected)
    for name, series in expected.items():
        numbers = found[f"{home}{name}"]
        assert sorted(numbers) == series.steps.tolist()
        values = series.values if name in history.scalars else series.rms
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


class Histograms:
    """A tracker that remembers of which steps it was told a histogram."""

    keeps_last_step = False

    def __init__(self) -> None:
        self.steps: list[int] = []

    def add_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        pass

    def add_histogram(self, step: int, name: str, exponents: Any) -> None:
        self.steps.append(step)


def test_histograms_come_the_more_rarely_the_longer_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "_RARER", 5)
    history = rg.History()
    history.add_sites(SITES)
    mirror = mirrors.Mirror(history, None, "mine", Selection("a:output.grad"), ("rms",), True)
    mirror._tracker = tracker = Histograms()  # type: ignore[assignment]  # no thread looks
    for step in range(40):
        history.add_rows(make_batch(Moment(step, 0, 0), {1: np.array([1.0 + step])}))
        mirror._tell_steps(is_last=step == 39)
    assert tracker.steps == [0, 1, 2, 3, 4, 5, 7, 9, 11, 14, 17, 21, 26, 32, 39]


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
    add, failing = boards.TensorBoardFiles.add_numbers, threading.Event()
    failed = threading.Event()

    def fail(self: Any, step: int, numbers: Mapping[str, float]) -> None:
        if failing.is_set():
            failed.set()
            raise ConnectionError("the server is away")
        add(self, step, numbers)

    monkeypatch.setattr(boards.TensorBoardFiles, "add_numbers", fail)
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
        rows = read_rows(tmp_path / "mine")
        assert [row["accuracy"] for row in rows] == [0.5] * 12 + [1.0]  # with ours among them, the last of each look
        assert rows[-1]["retrograd/loss"] == pytest.approx(recording.history.loss.values[-1])
        ours = read_series(read_records(tmp_path / "ours"))
        check_series({name: ours[name] for name in ours if name[0] != "_" and name != "step"}, recording.history)
    finally:
        wandb.teardown()


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
    assert set(read_board(tmp_path / "board")) == set(recording.history.scalars)


def test_an_export_of_some_series(tmp_path: Path) -> None:
    model = make_net()
    with rg.record(model, tmp_path / "run"):
        train(model)
    path = rg.export(tmp_path / "run", "tensorboard", tmp_path / "board", sites="*:weight.grad", statistics=["rms"])
    check_series(read_board(path), rg.open_run(tmp_path / "run").history)
    with pytest.raises(ExportError, match="not chosen for 'csv'"):
        rg.export(tmp_path / "run", "csv", sites="*")


def test_what_the_program_logs_to_its_run_of_wandb_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step of its own, too: the library drops what comes after a row of a higher one."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(console="off", x_disable_stats=True)
    mine = wandb.init(project="mine", dir=str(tmp_path / "mine"), settings=settings)
    try:
        model = make_net()
        logged = iter(range(100))
        with rg.record(model) as recording:
            mirror = rg.mirror(recording, mine)

            def log() -> None:
                time.sleep(0.02)
                step = next(logged)
                mine.log({"accuracy": step}, step=step)

            train(model, 30, each=log)
        mine.log({"accuracy": 1000}, step=30)
        mine.finish()
        rows = read_rows(tmp_path / "mine")
        assert [(row["_step"], row["accuracy"]) for row in rows] == [*((step, step) for step in range(30)), (30, 1000)]
        told = [row for row in rows if "retrograd/loss" in row]
        losses = dict(zip(recording.history.loss.steps.tolist(), recording.history.loss.values.tolist(), strict=True))
        assert 1 < len(told) <= mirror.steps
        assert mirror.steps + mirror.skipped == 30
        for row in told:
            assert row["retrograd/loss"] == pytest.approx(losses[row["retrograd/step"]])
        assert told[-1]["retrograd/step"] == 29
    finally:
        wandb.teardown()


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """What was logged, row by row."""
    records = [each for each in read_records(folder) if each.WhichOneof("record_type") == "history"]
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
    ]


def test_a_run_of_wandb_beside_that_of_a_sweep_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    wandb.teardown()  # it reads them once
    try:
        with rg.record(make_net()) as recording, pytest.raises(ExportError, match=r"rg.mirror\(run, wandb.run\)"):
            rg.mirror(recording, "wandb", tmp_path)
    finally:
        wandb.teardown()


def test_one_waits_for_a_mirror(tmp_path: Path) -> None:
    model = make_net()
    with rg.record(model, tmp_path / "run"):
        train(model)
    mirror = rg.mirror(tmp_path / "run", "tensorboard", tmp_path / "board")
    assert mirror.wait()
    assert mirror.is_over
    assert str(tmp_path / "board") in mirror.place
    check_series(read_board(tmp_path / "board"), rg.open_run(tmp_path / "run").history)
    with rg.record(model) as recording:
        mirror = rg.mirror(recording, "tensorboard", tmp_path / "another")
        assert not mirror.wait(0.05)


def test_a_fork_leaves_the_mirror_to_its_parent(tmp_path: Path) -> None:
    model = make_net()
    with rg.record(model) as recording:
        mirror = rg.mirror(recording, "tensorboard", tmp_path / "board")
        train(model, 6)
        process = multiprocessing.get_context("fork").Process(target=end_all, args=(recording, mirror))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert not mirror.is_over
        train(model, 6)
    check_series(read_board(tmp_path / "board"), recording.history)


def end_all(recording: rg.Recording, mirror: rg.Mirror) -> None:
    recording.close()
    mirror.close()
    assert mirror.wait()


def test_other_ranks_mirror_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    model = make_net()
    with rg.record(model) as recording:
        mirror = rg.mirror(recording, "tensorboard", tmp_path / "board")
        train(model)
    assert (mirror.place, mirror.steps, mirror.wait()) == ("", 0, True)
    assert not (tmp_path / "board").exists()
