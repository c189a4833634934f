"""The callback for transformers, in its own trainer."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from tests.integrations.logs import Breaks, offline, read_alerts, read_board
from tests.integrations.nets import SITES, Net, are_equal, check_same, count_hooks, make_data, train_plainly, weights

transformers = pytest.importorskip("transformers", exc_type=ImportError)
callbacks = pytest.importorskip("retrograd.integrations.transformers", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")


class Fails(Net):
    """Raises in the sixth forward."""

    error: type[BaseException] = ValueError
    count = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.count += 1
        if self.count == 6:
            raise self.error("on purpose")
        return super().forward(x, labels)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def make_trainer(model: nn.Module, *parts: Any, **options: Any) -> Any:
    given = {
        "output_dir": "out",
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    data = [{"x": x, "labels": label} for x, label in zip(*make_data(), strict=True)]
    arguments = transformers.TrainingArguments(**(given | options))
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=list(parts)
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def record_to(path: str, **options: Any) -> Any:
    return callbacks.RetrogradCallback(path, **({"sites": SITES, "quiet": True} | options))


def read(path: str) -> rg.History:
    return rg.open_run(path).history


def logged_steps(trainer: Any, name: str) -> list[int]:
    return [each["step"] for each in trainer.state.log_history if name in each]


def phases(history: rg.History, site: str) -> dict[str, list[int]]:
    rows = history.table().to_pandas()
    rows = rows[rows.site == site]
    return {str(phase): list(dict.fromkeys(map(int, part.step))) for phase, part in rows.groupby("phase")}


def test_it_gives_what_a_plain_loop_gives() -> None:
    make_trainer(Net(), record_to("run")).train()
    check_same(read("run"), train_plainly())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_and_evaluations_are_those_that_the_trainer_logs(accumulate: int) -> None:
    trainer = make_trainer(
        Net(),
        record_to("run", sites=["net:output"]),
        gradient_accumulation_steps=accumulate,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
    )
    trainer.train()
    found = phases(read("run"), "net:output")
    assert found == {"train": logged_steps(trainer, "loss"), "no_grad": logged_steps(trainer, "eval_loss")}
    assert found["train"] == list(range(1, 9))
    assert found["no_grad"] == [0, 2, 4, 6, 8]


def test_accumulated_gradients_are_one_step() -> None:
    make_trainer(Net(), record_to("run"), gradient_accumulation_steps=2, max_steps=4).train()
    found, expected = read("run"), train_plainly(2, updates=4)
    assert list(found["net.2:weight.grad"].steps) == [1, 2, 3, 4]
    check_same(found, expected)


def test_updates_that_loss_scaling_skips_are_steps_as_they_are_logged() -> None:
    trainer = make_trainer(Net(), record_to("run"))
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    trainer.train()
    history = read("run")
    skipped = [event.moment.step for event in history.events if event.kind == "skipped"]
    assert skipped[0] == 1
    assert list(history["net.0:output"].steps) == logged_steps(trainer, "loss") == list(range(1, 9))


def test_training_is_bitwise_the_same_and_nothing_stays() -> None:
    plain, recorded = Net(), Net()
    make_trainer(plain).train()
    callback = record_to("run", sites=None, tensors="net.0:output")
    trainer = make_trainer(recorded, callback)
    trainer.train()
    assert are_equal(weights(plain), weights(recorded))
    assert count_hooks(recorded) == 0
    assert not callback.is_recording


@pytest.mark.parametrize("step", [3, 8])
def test_a_checkpoint_goes_on_with_the_run(step: int) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 12, "eval_strategy": "steps", "eval_steps": 3}
    make_trainer(Net(), record_to("whole"), **saving).train()
    expected = read("whole")
    before = {site: expected[site].rms for site in SITES}
    trainer = make_trainer(Net(), callbacks.RetrogradCallback(sites=SITES, quiet=True), **saving)
    trainer.train(resume_from_checkpoint=f"out/checkpoint-{step}")
    assert not Path("runs").exists()
    found = read("whole")
    assert list(found["net.0:output"].steps) == logged_steps(trainer, "loss") == list(range(1, 13))
    assert all((found[site].rms == before[site]).all() for site in SITES)
    assert rg.open_run("whole").status == "finished"


def test_the_state_is_plain_in_the_trainers_own_file() -> None:
    make_trainer(Net(), record_to("run"), save_strategy="steps", save_steps=4).train()
    saved = json.loads(Path("out/checkpoint-4/trainer_state.json").read_text())["stateful_callbacks"]["retrograd"]
    assert saved == {"args": {}, "attributes": {"path": str(Path("run").absolute()), "step": 5}}


def test_a_trainer_that_restores_callbacks_leaves_ours_as_it_is() -> None:
    saving = {"save_strategy": "steps", "save_steps": 4, "restore_callback_states_from_checkpoint": True}
    make_trainer(Net(), record_to("run"), **saving).train()
    make_trainer(Net(), record_to("run"), **saving).train(resume_from_checkpoint="out/checkpoint-4")
    assert list(read("run")["net.0:output"].steps) == list(range(1, 9))
    assert set(read("run").sites) == set(SITES)


def test_a_callback_serves_several_trainings() -> None:
    callback = record_to("run")
    for _ in range(2):
        make_trainer(Net(), callback).train()
    check_same(read("run"), train_plainly())
    check_same(read("run-2"), train_plainly())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_is_recorded_behind_a_with_statement(error: type[BaseException]) -> None:
    model = Fails()
    model.error = error
    with pytest.raises(error), record_to("run", sites=None) as callback:
        make_trainer(model, callback).train()
    run = rg.open_run("run")
    assert run.status == "failed"
    assert run.ranks[0].facts["error"]["kind"] == error.__name__
    assert count_hooks(model) == 0


def test_a_callback_that_is_forgotten_ends_its_recording() -> None:
    model = Fails()
    trainer = make_trainer(model, record_to("run"))
    with pytest.raises(ValueError, match="on purpose"):
        trainer.train()
    del trainer
    gc.collect()
    assert count_hooks(model) == 0
    assert rg.open_run("run").status == "failed"


def test_a_trainer_that_begins_again_ends_what_went_on() -> None:
    model = Fails()
    trainer = make_trainer(model, record_to("run"))
    with pytest.raises(ValueError, match="on purpose"):
        trainer.train()
    trainer.train()
    assert rg.open_run("run").status == "failed"
    assert rg.open_run("run-2").status == "finished"
    assert list(read("run-2")["net.0:output"].steps) == list(range(1, 9))


def test_copies_and_pickles_have_the_options_and_no_recording() -> None:
    callback = record_to("run", schedule=2)
    copies: list[Any] = []

    class Copy(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            copies[:] = [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]

    make_trainer(Net(), callback, Copy()).train()
    for number, other in enumerate(copies):
        assert other.recording is None
        make_trainer(Net(), other).train()
        assert list(read("run-2")["net.0:output"].steps) == [2, 4, 6, 8]
        Path("run-2").rename(f"kept-{number}")


def test_findings_are_printed_and_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    callback = callbacks.RetrogradCallback()
    trainer = make_trainer(Net(), callback, learning_rate=float("inf"), logging_nan_inf_filter=False)
    trainer.train()
    (run,) = Path("runs").iterdir()
    assert run.name.startswith("Net-")
    critical = callback.findings[0]
    assert critical.severity == "critical"
    assert critical.message.removesuffix(".")[:40] in capfd.readouterr().err
    assert trainer.state.log_history[-1] == {**callback.finding_counts, "step": 8, "epoch": 1.0}
    assert callback.finding_counts["retrograd/critical"] >= 1


def test_a_healthy_end_is_no_line_of_the_log() -> None:
    def log(*parts: Any) -> list[dict[str, float]]:
        trainer = make_trainer(Net(), *parts)
        trainer.train()
        lines = trainer.state.log_history
        return [{name: value for name, value in line.items() if not name.startswith("train_")} for line in lines]

    callback = record_to("run")
    assert log() == log(callback)
    assert callback.findings is not None
    assert not callback.findings


def test_mlflow_is_told_by_its_reporter(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///board.db")
    model = Net()
    model.net.register_forward_pre_hook(Breaks(after=3))
    callback = callbacks.RetrogradCallback("run", quiet=True)
    make_trainer(model, callback, report_to=["mlflow"]).train()
    client = mlflow.MlflowClient("sqlite:///board.db")
    (found,) = client.search_runs(["0"])
    assert found.info.status == "FINISHED"
    told = client.get_metric_history(found.info.run_id, "retrograd/critical")
    assert [each.step for each in told] == [4, 8]
    assert told[-1].value == callback.finding_counts["retrograd/critical"] >= 1
    assert {each.step for each in client.get_metric_history(found.info.run_id, "loss")} == set(range(1, 9))


def test_the_reporters_are_told_while_it_trains_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    model.net.register_forward_pre_hook(Breaks(after=3))
    callback = callbacks.RetrogradCallback("run")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "board")
    with offline(monkeypatch, Path("sent")):
        trainer = make_trainer(model, callback, report_to=["tensorboard", "wandb"])
        trainer.train()
    numbers, texts = read_board(Path("board"), "train/retrograd/critical")
    assert list(numbers) == list(texts) == [4, 8]
    assert "inf is in a parameter" in texts[4]
    assert numbers[8] == callback.finding_counts["retrograd/critical"]
    assert f"retrograd: {callback._critical[0].detector}" in read_alerts(Path("sent"))
    assert logged_steps(trainer, "retrograd/critical") == [4, 8]
    assert logged_steps(trainer, "loss") == list(range(1, 9))  # no log that was due is lost
    assert capfd.readouterr().err.count("retrograd: critical") == 1


def test_callbacks_are_called_as_often_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(*others: Any) -> list[str]:
        calls: list[str] = []

        def make(name: str) -> Any:
            def begin(self: Any, *_: Any, **__: Any) -> None:
                calls.append(name)

            return type(name, (transformers.TrainerCallback,), {"on_train_begin": begin})()

        make_trainer(Net(), make("First"), *others, make("Last")).train()
        return calls

    assert count() == count(record_to("run")) == ["First", "Last"]


def test_report_to_takes_it_by_the_table_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import integration_utils

    with pytest.raises(ValueError, match="retrograd is not supported"):
        make_trainer(Net(), report_to=["retrograd"])
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "retrograd", callbacks.RetrogradCallback)
    make_trainer(Net(), report_to=["retrograd"]).train()
    (run,) = Path("runs").iterdir()
    assert list(rg.open_run(run).history["net.0:output"].steps) == list(range(1, 9))
