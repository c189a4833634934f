"""Steps that somebody else counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import retrograd as rg

BATCH = torch.arange(12.0).reshape(4, 3) / 10


class Loop:
    """A model with an optimizer."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        self.optimizer = make(self.model.parameters(), lr=0.1)

    def accumulate(self, times: int = 1) -> None:
        for _ in range(times):
            self.model(BATCH).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(BATCH)


def moments(history: rg.History) -> list[tuple[int, int, str]]:
    """Steps, micro-batches and phases at which the output of the model was seen."""
    rows = history.table().to_pandas()
    assert set(rows.site) == {"self:output"}
    return [(int(row.step), int(row.micro), str(row.phase)) for row in rows.itertuples()]


def test_what_comes_belongs_to_the_step_that_was_begun() -> None:
    loop = Loop()
    with rg.record(loop.model, sites="self:output") as recording:
        for step in (7, 8, 12):
            recording.begin_step(step)
            loop.accumulate(2)
            loop.update()
            loop.evaluate()
    assert moments(recording.history) == [
        (step, micro, phase) for step in (7, 8, 12) for micro, phase in ((0, "train"), (1, "train"), (0, "no_grad"))
    ]


def test_the_same_step_goes_on() -> None:
    loop = Loop()
    with rg.record(loop.model, sites="self:output") as recording:
        for batch in range(6):
            recording.begin_step(batch // 3)
            loop.accumulate()
            if batch % 3 == 2:
                loop.update()
    assert moments(recording.history) == [(step, micro, "train") for step in (0, 1) for micro in (0, 1, 2)]


def test_two_updates_in_one_step_are_both_measured() -> None:
    loop = Loop()
    with rg.record(loop.model, sites=["0:weight.update", "0:weight.grad"]) as recording:
        recording.begin_step(3)
        before = loop.model[0].weight.detach().clone()
        changes = []
        for _ in range(2):
            loop.accumulate()
            loop.update()
            after = loop.model[0].weight.detach().clone()
            changes.append(after - before)
            before = after
    series = recording.history["0:weight.update"]
    assert list(series.steps) == [3]
    assert series.rms[0] == pytest.approx(torch.stack(changes).double().square().mean().sqrt().item(), rel=1e-6)


def test_an_update_by_hand_ends_no_step() -> None:
    loop = Loop()
    with rg.record(loop.model, sites="self:output") as recording:
        recording.begin_step(1)
        for _ in range(2):
            loop.accumulate()
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    assert {step for step, _, _ in moments(recording.history)} == {1}


def test_reading_in_between_begins_nothing() -> None:
    loop = Loop()
    with rg.record(loop.model, sites="self:output") as recording:
        recording.begin_step(5)
        loop.accumulate()
        loop.update()
        assert list(recording.history["self:output"].steps) == [5]
        assert recording.step == 6
        loop.evaluate()
        recording.begin_step(6)
        loop.accumulate()
    assert moments(recording.history) == [(5, 0, "train"), (5, 0, "no_grad"), (6, 0, "train")]


def test_the_schedule_is_asked_for_the_number() -> None:
    loop = Loop()
    with rg.record(loop.model, sites="self:output", schedule=4) as recording:
        for step in range(1, 10):
            recording.begin_step(step)
            loop.accumulate()
            loop.update()
    assert [step for step, _, _ in moments(recording.history)] == [4, 8]


def test_a_checkpoint_of_the_recording_says_which_step_comes(tmp_path: Path) -> None:
    loop = Loop()
    with rg.record(loop.model, tmp_path / "run", sites="self:output") as recording:
        for step in (1, 2, 3):
            recording.begin_step(step)
            loop.accumulate()
            loop.update()
            loop.evaluate()
            if step == 2:
                state = recording.state_dict()
    assert state == {"step": 3}
    with rg.record(loop.model, tmp_path / "run", sites="self:output", resume=state) as recording:
        recording.begin_step(3)
        loop.accumulate()
    assert [step for step, _, _ in moments(rg.open_run(tmp_path / "run").history)] == [1, 1, 2, 2, 3]


def test_parts_that_are_called_by_themselves_are_forwards() -> None:
    loop = Loop()
    first = loop.model[0]
    with rg.record(loop.model, sites="0:output") as recording:
        recording.add_root(first)
        for _ in range(2):
            first(BATCH).square().mean().backward()
            loop.update()
            with torch.no_grad():
                for _ in range(3):
                    first(BATCH)
    evaluation = recording.history["0:output"].select(phase="no_grad")
    assert recording.history.sites == ["0:output"]
    assert list(evaluation.steps) == [1, 2]
