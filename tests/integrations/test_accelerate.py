"""The tracker for Accelerate, in a loop of its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import retrograd as rg
from tests.integrations.logs import Breaks, offline, read_alerts, read_board
from tests.integrations.nets import (
    BATCHES,
    SITES,
    Net,
    are_equal,
    check_same,
    count_hooks,
    make_data,
    train_plainly,
    weights,
)

accelerate = pytest.importorskip("accelerate", exc_type=ImportError)
trackers = pytest.importorskip("retrograd.integrations.accelerate", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def record_to(path: str, **options: Any) -> Any:
    return trackers.RetrogradTracker(path, **({"sites": SITES, "quiet": True} | options))


def read(path: str) -> rg.History:
    return rg.open_run(path).history


class Loop:
    """What a user writes."""

    def __init__(self, *log_with: Any, accumulate: int = 1, rate: float = 0.1, scaler: Any = None) -> None:
        self.accelerator = accelerate.Accelerator(
            cpu=True, log_with=list(log_with), gradient_accumulation_steps=accumulate
        )
        self.accelerator.scaler = scaler
        net = Net()
        self.model, self.optimizer = self.accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=rate))
        self.accelerator.init_trackers("demo", config={"rate": rate})
        for tracker in log_with:
            if hasattr(tracker, "state_dict"):
                self.accelerator.register_for_checkpointing(tracker)

    def train(self, first: int = 0, last: int = BATCHES) -> None:
        x, labels = make_data()
        for number in range(first, last):
            with self.accelerator.accumulate(self.model):
                loss = self.model(x.split(4)[number % BATCHES], labels.split(4)[number % BATCHES])["loss"]
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.accelerator.log({"loss": loss.item()}, step=number)


def test_it_gives_what_a_plain_loop_gives() -> None:
    tracker = record_to("run")
    loop = Loop(tracker)
    tracker.watch(loop.accelerator, loop.model)
    assert loop.accelerator.get_tracker("retrograd", unwrap=True) is tracker.recording
    loop.train()
    loop.accelerator.end_training()
    check_same(read("run"), train_plainly())
    assert list(read("run")["net.0:output"].steps) == list(range(8))


def test_accumulated_gradients_are_one_step() -> None:
    tracker = record_to("run")
    loop = Loop(tracker, accumulate=2)
    tracker.watch(loop.accelerator, loop.model)
    loop.train()
    loop.accelerator.end_training()
    check_same(read("run"), train_plainly(2, updates=4))


def test_updates_that_loss_scaling_skips_are_steps_too() -> None:
    tracker = record_to("run")
    loop = Loop(tracker, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127))
    loop.model.net[2].weight.data.mul_(100)  # so that gradients behind it overflow
    tracker.watch(loop.accelerator, loop.model)
    loop.train()
    loop.accelerator.end_training()
    history = read("run")
    assert next(event.moment.step for event in history.events if event.kind == "skipped") == 0
    assert list(history["net.0:output"].steps) == list(range(8))


def test_an_evaluation_is_of_the_step_that_comes_next() -> None:
    tracker = record_to("run")
    loop = Loop(tracker)
    tracker.watch(loop.accelerator, loop.model)
    loop.train(0, 3)
    with torch.no_grad():
        loop.model(*make_data())
    loop.train(3, 5)
    loop.accelerator.end_training()
    output = read("run")["net.0:output"]
    assert (list(output.steps), list(output.select(phase="no_grad").steps)) == ([0, 1, 2, 3, 4], [3])


def test_training_is_bitwise_the_same_and_nothing_stays() -> None:
    plain = Loop()
    plain.train()
    tracker = record_to("run", sites=None)
    recorded = Loop(tracker)
    tracker.watch(recorded.accelerator, recorded.model)
    recorded.train()
    recorded.accelerator.end_training()
    assert are_equal(weights(plain.model), weights(recorded.model))
    assert count_hooks(recorded.model) == 0


def test_a_checkpoint_goes_on_with_the_run() -> None:
    tracker = record_to("run")
    loop = Loop(tracker)
    tracker.watch(loop.accelerator, loop.model)
    loop.train(0, 4)
    loop.accelerator.save_state("saved")
    loop.train(4, 6)  # lost
    loop.accelerator.end_training()
    tracker = trackers.RetrogradTracker(sites=SITES, quiet=True)
    loop = Loop(tracker)
    loop.accelerator.load_state("saved")
    tracker.watch(loop.accelerator, loop.model)
    loop.train(4, 8)
    loop.accelerator.end_training()
    assert not Path("runs").exists()
    assert list(read("run")["net.0:output"].steps) == list(range(8))
    check_same(read("run"), train_plainly())


def test_a_checkpoint_is_loaded_before_the_model_is_watched() -> None:
    tracker = record_to("run")
    loop = Loop(tracker)
    tracker.watch(loop.accelerator, loop.model)
    loop.train(0, 2)
    loop.accelerator.save_state("saved")
    with pytest.raises(rg.RetrogradError, match="watch"):
        loop.accelerator.load_state("saved")
    loop.accelerator.end_training()


def test_a_tracker_serves_several_runs() -> None:
    tracker = record_to("run")
    for _ in range(2):
        loop = Loop(tracker)
        tracker.watch(loop.accelerator, loop.model)
        loop.train()
        loop.accelerator.end_training()
    check_same(read("run"), train_plainly())
    check_same(read("run-2"), train_plainly())


def test_an_exception_is_recorded_behind_a_with_statement() -> None:
    def train(tracker: Any) -> None:
        loop = Loop(tracker)
        tracker.watch(loop.accelerator, loop.model)
        loop.train(0, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), record_to("run") as tracker:
        train(tracker)
    run = rg.open_run("run")
    assert run.status == "failed"
    assert run.ranks[0].facts["error"]["kind"] == "KeyboardInterrupt"
    assert list(run.history["net.0:output"].steps) == [0, 1, 2]


def test_copies_and_pickles_have_the_options_and_no_recording() -> None:
    tracker = record_to("run", schedule=2)
    loop = Loop(tracker)
    tracker.watch(loop.accelerator, loop.model)
    copies = [copy.deepcopy(tracker), pickle.loads(pickle.dumps(tracker))]
    loop.accelerator.end_training()
    for number, other in enumerate(copies):
        assert other.recording is None
        loop = Loop(other)
        other.watch(loop.accelerator, loop.model)
        loop.train()
        loop.accelerator.end_training()
        (run,) = Path().glob("run-2")
        assert list(read("run-2")["net.0:output"].steps) == [0, 2, 4, 6]
        run.rename(f"kept-{number}")


def test_findings_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    tracker = trackers.RetrogradTracker()
    loop = Loop(tracker, rate=float("inf"))
    tracker.watch(loop.accelerator, loop.model)
    loop.train()
    loop.accelerator.end_training()
    (run,) = Path("runs").iterdir()
    assert run.name.startswith("Net-")
    assert tracker.findings[0].severity == "critical"
    assert tracker.findings[0].message.removesuffix(".")[:40] in capfd.readouterr().err


def test_the_other_trackers_get_the_findings() -> None:
    logged: list[dict[str, Any]] = []

    class Other(accelerate.tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "other", False, None

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            logged.append(values)

        def finish(self) -> None:
            logged.append({"end": 1})

    tracker = record_to("run", sites=None)
    loop = Loop(Other(), rate=float("inf"))
    tracker.watch(loop.accelerator, loop.model)
    loop.train()
    loop.accelerator.end_training()
    assert logged[-2:] == [tracker.finding_counts, {"end": 1}]
    assert tracker.finding_counts["retrograd/critical"] >= 1


def test_the_other_trackers_are_told_while_it_trains(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with offline(monkeypatch, Path("sent")):
        tracker = trackers.RetrogradTracker("run")
        accelerator = accelerate.Accelerator(cpu=True, log_with=["wandb", "tensorboard"], project_dir="board")
        loop = Loop.__new__(Loop)
        net = Net()
        loop.accelerator = accelerator
        loop.model, loop.optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        net.net.register_forward_pre_hook(Breaks(after=3))
        accelerator.init_trackers("demo")
        tracker.watch(accelerator, loop.model)
        loop.train()
        accelerator.end_training()
    numbers, texts = read_board(Path("board"))
    assert list(numbers) == [3, 7]
    assert list(texts) == [3, 7]
    assert numbers[7] == tracker.finding_counts["retrograd/critical"]
    assert "inf is in a parameter" in texts[3]
    assert f"retrograd: {tracker._critical[0].detector}" in read_alerts(Path("sent"))
    assert capfd.readouterr().err.count("retrograd: critical") == 1
