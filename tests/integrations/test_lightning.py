"""The callback for Lightning, in its own trainer."""

from __future__ import annotations

import copy
import csv
import json
import logging
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import retrograd as rg
from tests.integrations.logs import Breaks, offline, read_alerts, read_board
from tests.integrations.nets import SITES, Net, are_equal, check_same, count_hooks, make_data, train_plainly, weights

lightning = pytest.importorskip("lightning.pytorch", exc_type=ImportError)
callbacks = pytest.importorskip("retrograd.integrations.lightning", exc_type=ImportError)
loggers = pytest.importorskip("lightning.pytorch.loggers", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")


class Task(lightning.LightningModule):
    """Calls its net, and is never called itself."""

    def __init__(self, fails_at: int = -1, error: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.net = Net().net
        self.fails_at, self.error = fails_at, error

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise self.error("on purpose")
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adversaries(lightning.LightningModule):
    """Two optimizers, stepped by hand: one twice, one once a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        one, two = self.optimizers()
        for optimizer in (one, one, two):
            loss = nn.functional.cross_entropy(self.second(self.first(batch[0])), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.second)]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield
    logging.getLogger("lightning.pytorch").setLevel(level)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*make_data()), batch_size=4)


def make_trainer(*parts: Any, **options: Any) -> Any:
    given = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "callbacks": list(parts),
    }
    return lightning.Trainer(**(given | options))


def record_to(path: str, **options: Any) -> Any:
    return callbacks.RetrogradCallback(path, **({"sites": SITES, "quiet": True} | options))


def read(path: str) -> rg.History:
    return rg.open_run(path).history


def logged_steps(name: str, folder: str = "logs") -> list[int]:
    """The steps under which the trainer's own logger has a value of this name."""
    (path,) = Path(folder).rglob("metrics.csv")
    with path.open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row.get(name)]


def phases(history: rg.History, site: str = "net:output") -> dict[str, list[int]]:
    rows = history.table().to_pandas()
    rows = rows[rows.site == site]
    return {str(phase): list(dict.fromkeys(map(int, part.step))) for phase, part in rows.groupby("phase")}


def test_it_gives_what_a_plain_loop_gives() -> None:
    make_trainer(record_to("run")).fit(Task(), loader())
    check_same(read("run"), train_plainly())


def test_accumulated_gradients_are_one_step() -> None:
    make_trainer(record_to("run"), accumulate_grad_batches=2).fit(Task(), loader())
    check_same(read("run"), train_plainly(2, updates=4))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_steps_and_evaluations_are_those_that_the_trainer_logs(accumulate: int) -> None:
    trainer = make_trainer(
        record_to("run", sites=["net:output"]),
        accumulate_grad_batches=accumulate,
        val_check_interval=4,
        max_epochs=2,
        logger=loggers.CSVLogger("logs"),
        num_sanity_val_steps=2,
    )
    trainer.fit(Task(), loader(), loader())
    found = phases(read("run"))
    assert found["train"] == logged_steps("loss")
    assert found["no_grad"] == logged_steps("validation")


def test_several_optimizers_by_hand_make_the_steps_that_are_logged() -> None:
    trainer = make_trainer(record_to("run", sites=["second:output"]), logger=loggers.CSVLogger("logs"))
    trainer.fit(Adversaries(), loader())
    found = phases(read("run"), "second:output")
    assert found == {"train": logged_steps("loss")}
    assert trainer.global_step == 3 * len(found["train"])


def test_updates_that_loss_scaling_skips_are_steps_as_they_are_logged() -> None:
    precision = lightning.plugins.MixedPrecision(
        precision="16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**126)
    )
    trainer = make_trainer(
        record_to("run", sites=["net:output"]), plugins=[precision], logger=loggers.CSVLogger("logs"), max_epochs=2
    )
    trainer.fit(Task(), loader())
    history = read("run")
    skipped = [event.moment.step for event in history.events if event.kind == "skipped"]
    assert skipped[:3] == [0, 1, 2]
    assert list(history["net:output"].steps) == logged_steps("loss") == list(range(16))
    assert trainer.global_step == 16


def test_training_is_bitwise_the_same_and_nothing_stays() -> None:
    plain, recorded = Task(), Task()
    make_trainer().fit(plain, loader(), loader())
    callback = record_to("run", sites=None, tensors="net.0:output")
    make_trainer(callback).fit(recorded, loader(), loader())
    assert are_equal(weights(plain), weights(recorded))
    assert count_hooks(recorded) == 0
    assert not callback.is_recording


@pytest.mark.parametrize("step", [3, 8, 9])  # in an epoch, behind its last batch, and in the one after it
def test_a_checkpoint_goes_on_with_the_run(step: int) -> None:
    checkpoints = lightning.callbacks.ModelCheckpoint(dirpath="saved", every_n_train_steps=1, save_top_k=-1)
    options = {"enable_checkpointing": True, "val_check_interval": 2, "max_epochs": 2}
    whole = make_trainer(record_to("whole"), checkpoints, logger=loggers.CSVLogger("logs"), **options)
    whole.fit(Task(), loader(), loader())
    Path("whole").rename("before")
    shutil.copytree("before", "whole")
    (saved,) = Path("saved").glob(f"*step={step}.ckpt")
    second = make_trainer(callbacks.RetrogradCallback(sites=SITES, quiet=True), **options)
    second.fit(Task(), loader(), loader(), ckpt_path=saved)
    assert not Path("runs").exists()
    found = read("whole")
    assert list(found["net.0:output"].steps) == logged_steps("loss") == list(range(16))
    assert rg.open_run("whole").status == "finished"
    if step == 8:  # in an epoch Lightning begins the data anew
        check_same(found, read("before"))


def test_a_checkpoint_of_another_place_begins_a_run_of_its_own() -> None:
    trainer = make_trainer(record_to("run"), max_steps=3)
    trainer.fit(Task(), loader())
    trainer.save_checkpoint("saved.ckpt")
    Path("run").rename("elsewhere")
    again = record_to("new")
    make_trainer(again, max_steps=6, max_epochs=2).fit(Task(), loader(), ckpt_path="saved.ckpt")
    assert list(read("new")["net.0:output"].steps) == [3, 4, 5]


def test_a_trainer_that_goes_on_by_itself_goes_on_with_its_run() -> None:
    callback = record_to("run")
    trainer = make_trainer(callback, max_epochs=1)
    task = Task()
    trainer.fit(task, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(task, loader())
    assert list(read("run")["net.0:output"].steps) == list(range(16))
    assert not Path("run-2").exists()


def test_a_callback_serves_several_fits() -> None:
    callback = record_to("run")
    for _ in range(2):
        make_trainer(callback).fit(Task(), loader())
    check_same(read("run"), train_plainly())
    check_same(read("run-2"), train_plainly())


def test_a_folder_of_somebody_else_is_left_alone() -> None:
    make_trainer(record_to("run")).fit(Task(), loader())
    with pytest.raises(rg.RetrogradError, match="run-exists"):
        make_trainer(record_to("run")).fit(Task(), loader())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_is_recorded(error: type[BaseException]) -> None:
    task = Task(fails_at=5, error=error)
    callback = record_to("run", sites=None)
    with pytest.raises((ValueError, SystemExit)):
        make_trainer(callback).fit(task, loader())
    run = rg.open_run("run")
    assert run.status == "failed"
    assert run.ranks[0].facts["error"]["kind"] == error.__name__
    assert list(run.history["net:output"].steps) == [0, 1, 2, 3, 4]
    assert count_hooks(task) == 0


def test_copies_and_pickles_have_the_options_and_no_recording() -> None:
    callback = record_to("run", schedule=2)
    copies: list[Any] = []

    class Copy(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            copies[:] = [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]

    make_trainer(callback, Copy()).fit(Task(), loader())
    for number, other in enumerate(copies, 2):
        assert other.recording is None
        make_trainer(other).fit(Task(), loader())
        assert list(read(f"run-{2}")["net.0:output"].steps) == [0, 2, 4, 6]
        Path("run-2").rename(f"kept-{number}")


def test_findings_are_printed_and_logged(capfd: pytest.CaptureFixture[str]) -> None:
    class Diverges(Task):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=float("inf"))

    callback = callbacks.RetrogradCallback()
    board = loggers.TensorBoardLogger("board")
    make_trainer(callback, logger=[loggers.CSVLogger("logs"), board]).fit(Diverges(), loader())
    (run,) = Path("runs").iterdir()
    assert run.name.startswith("Diverges-")
    assert [each.detector for each in callback.findings] == [each.detector for each in rg.explain(run)]
    critical = callback.findings[0]
    assert critical.severity == "critical"
    said = capfd.readouterr().err
    assert f"recording to runs/{run.name}" in said
    assert critical.message.removesuffix(".")[:40] in said
    assert logged_steps("retrograd/critical")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(board.log_dir).Reload()
    assert events.Scalars("retrograd/critical")[0].value == callback.finding_counts["retrograd/critical"] >= 1
    *_, text = events.Tensors("retrograd/findings/text_summary")
    assert critical.message.removesuffix(".")[:20].encode() in text.tensor_proto.string_val[0]


def test_what_is_critical_is_logged_while_it_trains_and_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[int, float]] = []

    class Look(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 5:
                trainer.loggers[0].experiment.flush()
                seen.append(read_board(Path("board"))[0])

    with offline(monkeypatch, Path("sent")):
        task = Task()
        task.net.register_forward_pre_hook(Breaks(after=3))
        callback = callbacks.RetrogradCallback("run")
        both = [loggers.TensorBoardLogger("board"), loggers.WandbLogger(save_dir="sent", offline=True)]
        make_trainer(callback, Look(), logger=both).fit(task, loader())
    numbers, texts = read_board(Path("board"))
    assert list(seen[0]) == [3]  # before training ends
    assert list(numbers) == list(texts) == [3, 8]
    assert numbers[8] == callback.finding_counts["retrograd/critical"]
    assert "inf is in a parameter" in texts[3]
    alerts = read_alerts(Path("sent"))
    critical = {each.detector for each in callback.findings if each.severity == "critical"}
    assert sorted(alerts) == sorted(f"retrograd: {each}" for each in critical | {callback._critical[0].detector})
    assert capfd.readouterr().err.count("retrograd: critical") == 1
    assert json.loads(next(e for e in read("run").events if e.kind == "finding").text)["step"] == 2  # its loss was fine


def test_mlflow_is_told_by_its_logger() -> None:
    mlflow = pytest.importorskip("mlflow")
    task = Task()
    task.net.register_forward_pre_hook(Breaks(after=3))
    callback = record_to("run", sites=None)
    logger = loggers.MLFlowLogger(tracking_uri="sqlite:///board.db")
    make_trainer(callback, logger=logger).fit(task, loader())
    client = mlflow.MlflowClient("sqlite:///board.db")
    told = client.get_metric_history(logger.run_id, "retrograd/critical")
    assert [each.step for each in told] == [3, 8]
    assert told[-1].value == callback.finding_counts["retrograd/critical"] >= 1
    assert client.get_run(logger.run_id).info.status == "FINISHED"


def test_a_healthy_end_is_no_line_of_the_log() -> None:
    callback = record_to("run")
    make_trainer(callback, logger=loggers.CSVLogger("logs")).fit(Task(), loader())
    assert callback.findings is not None
    assert not callback.findings
    assert not logged_steps("retrograd/critical")


def test_a_logger_that_fails_does_not_end_the_training(capfd: pytest.CaptureFixture[str]) -> None:
    class Fails(loggers.CSVLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "retrograd/critical" in metrics:
                raise OSError("no space")
            super().log_metrics(metrics, step)

    task = Task()
    task.net.register_forward_pre_hook(Breaks(after=3))
    make_trainer(record_to("run", sites=None), logger=Fails("logs")).fit(task, loader())
    assert logged_steps("loss") == list(range(8))
    assert "did not take the findings: OSError('no space')" in capfd.readouterr().err


def test_the_command_line_of_lightning_reads_it_from_yaml() -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    Path("config.yaml").write_text(
        """
trainer:
  max_epochs: 1
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: retrograd.integrations.lightning.RetrogradCallback
      init_args:
        path: run
        sites: ["net.*:output.grad", "!net.2*"]
        schedule: 2
        tensors: ["net.0:output.grad"]
        tensor_budget: 1MB
        histogram: false
        quiet: true
"""
    )

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

    LightningCLI(
        Task, Data, args=["fit", "--config", "config.yaml"], save_config_callback=None, seed_everything_default=1
    )
    history = read("run")
    assert history.sites == ["net.0:output.grad", "net.1:output.grad"]
    assert list(history["net.0:output.grad"].steps) == [0, 2, 4, 6]
    assert [kept.step for kept in history["net.0:output.grad"].tensors] == [0, 2, 4, 6]
    bare = ["--trainer.callbacks+=RetrogradCallback", "--trainer.callbacks.path=runs/first", "--trainer.logger=false"]
    made = LightningCLI(Task, Data, args=bare, save_config_callback=None, run=False)
    assert any(isinstance(each, callbacks.RetrogradCallback) for each in made.trainer.callbacks)


def test_wrong_options_are_told_at_once() -> None:
    with pytest.raises(rg.RetrogradError, match="bad-schedule"):
        callbacks.RetrogradCallback(schedule=0)
